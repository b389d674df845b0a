"""The simulator itself: what is registered, what is recorded, what may not be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend_sim.recorder import HostReadError
from ascend_sim.simulator import PACKAGES, simulate
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

BF16, I32 = torch.bfloat16, torch.int32


def test_operators_come_and_go() -> None:
    """Operators exist inside the block only, and a second simulation may follow with other schemas."""
    for release in ("2.10.0", "2.13.0", "2.10.0"):
        assert not hasattr(torch.ops.npu, "npu_moe_finalize_routing")
        with simulate(torch_npu=release) as machine:
            names = [a.name for a in torch.ops.npu.npu_moe_finalize_routing.default._schema.arguments]
            assert ("k" in names) is (release == "2.13.0")
            assert set(machine.schemas) >= {"custom::npu_hc_pre", "npu::compressor"}
        assert not hasattr(torch.ops.npu, "npu_moe_finalize_routing")


def test_two_simulations_at_once_are_refused() -> None:
    """An operator is registered once; the first simulation stays whole."""
    with simulate():
        with pytest.raises(RuntimeError, match="exists already"), simulate():
            pass
        assert hasattr(torch.ops.custom, "npu_hc_pre")


def test_a_build_may_lack_operators_or_differ() -> None:
    """Operators can be left out, and declared with other schemas than the recorded ones."""
    other = "custom::npu_hc_post(Tensor x, Tensor residual, Tensor post, Tensor comb, int extra) -> Tensor"
    with simulate(without=["custom::npu_hc_pre"], instead={"custom::npu_hc_post": other}) as machine:
        assert not hasattr(torch.ops.custom, "npu_hc_pre")
        assert "extra" in str(torch.ops.custom.npu_hc_post.default._schema)
        assert machine.schemas["custom::npu_hc_post"] == other


@pytest.mark.parametrize(("chip", "name", "exists"), [("a3", "compressor", True), ("a5", "compressor", False)])
def test_packages_register_what_their_chip_has(chip: str, name: str, exists: bool) -> None:
    """The compressor of sgl-kernel-npu is not built for the A5."""
    with simulate(chip=chip, providers=PACKAGES):
        assert hasattr(torch.ops.npu, name) is exists


def test_wrong_keywords_are_refused_by_the_schema() -> None:
    """A call that does not bind to the schema never reaches a kernel."""
    x = torch.zeros(2, 4, 16, dtype=BF16)
    with simulate(strict_sizes=False):
        with pytest.raises(RuntimeError, match="hc_multiply"):
            torch.ops.custom.npu_hc_pre(x, torch.zeros(24, 64), torch.zeros(3), torch.zeros(24), hc_multiply=4)
        with pytest.raises(RuntimeError, match="missing value for argument 'hc_base'"):
            torch.ops.custom.npu_hc_pre(x, torch.zeros(24, 64), torch.zeros(3))


def test_recorder_lists_calls_in_order() -> None:
    """Names, tensors and options of the calls to the packages' operators, nothing else."""
    x = torch.ones(2, 4, 16, dtype=BF16)
    with simulate(strict_sizes=False) as machine, machine.recorder() as seen:
        y, _ = torch.ops.npu.npu_rms_norm(x, torch.ones(16, dtype=BF16))
        torch.ops.npu.npu_dynamic_quant(y.flatten(0, 1), quant_mode="pertoken")
    assert seen.names() == ["npu::npu_rms_norm", "npu::npu_dynamic_quant"]
    assert seen.calls[0].tensors == (((2, 4, 16), BF16), ((16,), BF16))


READS = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "bool": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x[0]),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "mask index": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "where": lambda x: torch.where(x > 0),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("kind", READS)
def test_host_reads_are_refused_between_kernels(kind: str) -> None:
    """Whatever needs a tensor's values on the host raises; inside kernels anything goes; ``reading`` allows it."""
    x = torch.tensor([1.0, 2.0, 0.0])
    rows = x.view(1, 3).to(BF16)
    with simulate() as machine:
        with machine.recorder():
            torch.ops.npu.npu_dynamic_quant(rows)  # reads inside
            with pytest.raises(HostReadError):
                READS[kind](x)
        with machine.recorder().reading():
            READS[kind](x)


def test_static_work_is_not_refused() -> None:
    """Cumulative sums, gathers, scatters and where with three arguments need no host."""
    x = torch.tensor([1.0, 2.0, 0.0])
    with simulate() as machine, machine.recorder():
        y = torch.where(x > 0, x, x.cumsum(0)).index_select(0, torch.tensor([2, 0]))
        torch.zeros(3).index_copy_(0, torch.tensor([1, 2]), y).masked_fill_(x > 1, 0.0)


def test_shapes_are_known_without_values() -> None:
    """Under fake tensors every operator that returns something fresh gives shape and dtype of its real result."""
    x = torch.ones(3, 4, 16, dtype=BF16)
    calls = {
        "hc_pre": lambda t: torch.ops.custom.npu_hc_pre(
            t(x), t(torch.ones(24, 64)), t(torch.ones(3)), t(torch.ones(24))
        ),
        "norm": lambda t: torch.ops.npu.npu_rms_norm(t(x), t(torch.ones(16, dtype=BF16))),
        "quant": lambda t: torch.ops.npu.npu_dynamic_quant(t(x)),
        "gate": lambda t: torch.ops.custom.npu_moe_gating_top_k(t(torch.ones(3, 8)), 2, norm_type=2),
        "matmul": lambda t: (
            torch.ops.npu.npu_quant_matmul(
                t(torch.ones(3, 16, dtype=torch.int8)),
                t(torch.ones(16, 8, dtype=torch.int8)),
                t(torch.ones(8)),
                output_dtype=BF16,
            ),
        ),
        "grouped": lambda t: (
            torch.ops.npu.npu_transpose_batchmatmul(
                t(torch.ones(3, 2, 16, dtype=BF16)),
                t(torch.ones(2, 16, 32, dtype=BF16)),
                perm_x1=[1, 0, 2],
                perm_y=[1, 0, 2],
            ),
        ),
        "cast": lambda t: (torch.ops.npu.npu_format_cast(t(torch.ones(16, 16, dtype=BF16)), 29),),
    }
    with simulate(strict_sizes=False), FakeTensorMode() as fake:
        for name, call in calls.items():
            shapes = [(tuple(r.shape), r.dtype) for r in call(fake.from_tensor)]
            with torch._subclasses.fake_tensor.unset_fake_temporarily():
                real = [(tuple(r.shape), r.dtype) for r in call(lambda tensor: tensor)]
            assert shapes == real, name


def routed(make: Callable[[Any], Any]) -> dict[str, Callable[[], Any]]:
    """Calls of the experts' operators, their tensors passed through ``make``."""
    x, ids = make(torch.ones(4, 64, dtype=BF16)), make(torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]], dtype=I32))
    counts, weights = make(torch.tensor([2, 2, 2, 2])), make(torch.ones(4, 2))
    index = make(torch.arange(8, dtype=I32))
    npu = torch.ops.npu
    routing = {"expert_num": 4, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
    product = {"split_item": 2, "group_type": 0, "group_list_type": 1, "group_list": counts}
    fused = {"activate_left": True, "quant_mode": 1, "swiglu_mode": 1}
    w, rows = make(torch.ones(4, 64, 16, dtype=BF16)), make(torch.ones(8, 64, dtype=BF16))
    return {
        "routing": lambda: npu.npu_moe_init_routing_v2(x, ids, active_expert_range=[1, 3], **routing),
        "int8 routing": lambda: npu.npu_moe_init_routing_v2(
            x, ids, active_expert_range=[0, 4], quant_mode=1, **routing
        ),
        "product": lambda: npu.npu_grouped_matmul([rows], [w], **product),
        "activation": lambda: (npu.npu_clipped_swiglu(rows, interleaved=False),),
        "int8 activation": lambda: npu.npu_dequant_swiglu_quant(rows, group_index=counts, **fused),
        "sum": lambda: (npu.npu_moe_token_unpermute(rows, index, make(torch.ones(4, 2, dtype=BF16))),),
        "filter": lambda: (
            npu.npu_top_k_top_p(make(torch.ones(4, 9)), make(torch.ones(4)), make(torch.ones(4, dtype=I32))),
        ),
        "dispatch": lambda: npu.npu_moe_distribute_dispatch_v2(x, ids, "ep", 1, 0, 4, expert_scales=weights),
        "int8 dispatch": lambda: npu.npu_moe_distribute_dispatch_v2(x, ids, "ep", 1, 0, 4, quant_mode=2),
    }


@pytest.mark.parametrize("name", routed(lambda x: x))
def test_shapes_of_routed_work_are_known_without_values(name: str) -> None:
    """Under fake tensors the experts' operators give shape and dtype of their real results."""
    with simulate(strict_sizes=False):
        real = [(tuple(r.shape), r.dtype) for r in routed(lambda x: x)[name]()]
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            shapes = [(tuple(r.shape), r.dtype) for r in routed(fake.from_tensor)[name]()]
    assert shapes == real


def test_shapes_of_blocks_are_known_without_values() -> None:
    """The same for what the A5 quantises in blocks."""
    x, w = torch.ones(3, 2, 64, dtype=BF16), torch.ones(2, 8, 64, dtype=BF16)

    def run(x: torch.Tensor, w: torch.Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
        codes, scales = torch.ops.npu.npu_dynamic_mx_quant(x, dst_type=292)
        w_codes, w_scales = torch.ops.npu.npu_dynamic_mx_quant(w, dst_type=292)
        options = {"group_sizes": [0, 0, 32], "perm_x1": [1, 0, 2], "perm_x2": [0, 2, 1], "perm_y": [1, 0, 2]}
        y = torch.ops.npu.npu_transpose_quant_batchmatmul(
            codes, w_codes, BF16, x1_scale=scales, x2_scale=w_scales, **options
        )
        found = [codes, scales, y, *torch.ops.npu.npu_dynamic_block_quant(x, dst_type=292)]
        return [(tuple(r.shape), r.dtype) for r in found]

    with simulate(chip="a5"):
        real = run(x, w)
        with FakeTensorMode() as fake:
            assert run(fake.from_tensor(x), fake.from_tensor(w)) == real


def test_a_step_of_kernels_traces_into_a_graph() -> None:
    """Operators stand as single nodes in a traced graph, writes included."""

    def step(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        y, _ = torch.ops.npu.npu_rms_norm(x, torch.ones(16, dtype=BF16))
        torch.ops.npu.npu_scatter_nd_update_(cache, slots, y)
        return cache.index_select(0, slots[:, 0])

    x, cache, slots = torch.ones(2, 16, dtype=BF16), torch.zeros(4, 16, dtype=BF16), torch.tensor([[1], [3]])
    with simulate():
        graph = make_fx(step, tracing_mode="fake")(x, cache, slots)
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert "npu.npu_rms_norm.default" in targets
        assert "npu.npu_scatter_nd_update_.default" in targets
        assert torch.equal(graph(x, cache, slots), torch.ones(2, 16, dtype=BF16))
