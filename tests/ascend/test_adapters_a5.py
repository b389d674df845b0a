"""The adapters of the A5 against plain arithmetic on the same roundings: products in blocks, streams, their calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ascend_sim.recorder import Recorder
from hypothesis import given
from hypothesis import strategies as st
from kit.ascend import emulated, machine_for
from kit.steps import examples
from purestep.ops.ascend.kernels import ascend_ops, fallbacks, takes_int8, takes_mx_experts, takes_mx_output
from purestep.ops.ascend.providers import choose_providers, installed_schemas
from purestep.ops.dispatch import REFERENCE, Ops
from purestep.ops.quantize import MXWeight, mx_weight
from purestep.state.numerics import Numerics
from torch import Tensor

BF16 = torch.bfloat16
PLAIN = emulated(Numerics.ascend_a5(mx_experts=True))


def draw(seed: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made() -> Ops:
    """The kernel table of the simulated machine."""
    return ascend_ops(choose_providers("a5", installed_schemas()))


@pytest.fixture
def ops() -> Iterator[Ops]:
    """The kernel table of a simulated A5."""
    with machine_for(chip="a5"):
        yield made()


def dequantised(w: MXWeight) -> Tensor:
    """Undo the blocks: f32[E,F,H]."""
    powers = torch.ldexp(torch.ones(w.exponents.shape), w.exponents.int() - 127)
    return w.codes.float() * powers.flatten(-2).repeat_interleave(32, -1)[..., : w.codes.shape[-1]]


@examples(15)
@given(seed=st.integers(0, 99), width=st.sampled_from([16, 32, 48, 64, 130]), size=st.sampled_from([1e-30, 1.0, 1e30]))
def test_weights_in_blocks(seed: int, width: int, size: float) -> None:
    """Codes times powers are the weight within a sixteenth, or what the largest code cuts off; zeros stay zero."""
    w = torch.cat((draw(seed, 2, 3, width, dtype=torch.float32) * size, torch.zeros(2, 1, width)), 1)
    found = mx_weight(w)
    assert (found.codes.dtype, found.exponents.dtype) == (torch.float8_e4m3fn, torch.uint8)
    assert found.exponents.shape == (2, 4, -(-width // 64), 2)
    back = dequantised(found)
    blocks = torch.nn.functional.pad(w, (0, -width % 32)).unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1).repeat_interleave(32, -1)[..., :width]
    # The power is the one below the largest number, and 448 of 512 are coded.
    allowed = w.abs() / 16 + largest * 2.0**-16
    is_cut = w.abs() > 0.87 * largest
    assert bool((((back - w).abs() <= allowed) | (is_cut & ((back - w).abs() <= w.abs() / 8))).all())
    assert not back[:, -1].any()


@pytest.mark.parametrize("n", [1, 5])
def test_weights_in_blocks_are_what_the_kernel_makes(n: int) -> None:
    """The quantisation of weights is that of the operator that quantises the rows, bit for bit."""
    w = draw(n, n, 7, 96)
    with machine_for(chip="a5"):
        codes, exponents = torch.ops.npu.npu_dynamic_mx_quant(w, dst_type=292)
    found = mx_weight(w)
    assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.exponents, exponents)


@pytest.mark.parametrize("n", [1, 5, 33])
def test_grouped_products_in_blocks(ops: Ops, n: int) -> None:
    """Rows and weights rounded in blocks, multiplied group by group, give the plain product of the rounded ones."""
    x, w = draw(n, n, 2, 64) * 3, draw(1, 2, 24, 64)
    found = ops.grouped_linear(x, mx_weight(w))
    assert found.dtype is BF16
    torch.testing.assert_close(found.float(), PLAIN.grouped_linear(x, w).float(), atol=1e-3, rtol=0.01)
    # A weight that is stored as the kernel wants it, axes exchanged, gives the same.
    stored = MXWeight(*(part.transpose(1, 2).contiguous().transpose(1, 2) for part in mx_weight(w)))
    assert torch.equal(ops.grouped_linear(x, stored), found)
    assert torch.equal(ops.grouped_linear(x, w), REFERENCE.grouped_linear(x, w))


@examples(10)
@given(seed=st.integers(0, 99), n=st.integers(1, 9), k=st.integers(1, 4), limit=st.sampled_from([0.6, 10.0]))
def test_experts_in_blocks(seed: int, n: int, k: int, limit: float) -> None:
    """Routed rows through experts in MX blocks, clamp included, equal the plain sum over rounded factors."""
    ids = torch.rand(n, 4, generator=torch.Generator().manual_seed(seed)).argsort(-1)[:, :k]
    weights = draw(seed + 1, n, k, dtype=torch.float32).softmax(-1)
    x, w13, w2 = draw(seed, n, 40), draw(2, 4, 2 * 48, 40) / 3, draw(3, 4, 40, 48) / 4
    with machine_for(chip="a5"):
        found = made().experts(x, ids, weights, mx_weight(w13), mx_weight(w2), limit)
    expected = PLAIN.experts(x, ids, weights, w13, w2, limit)
    assert found.dtype is torch.float32
    # A last bit of a hidden row may move one of its codes.
    torch.testing.assert_close(found, expected, atol=0.05 * float(expected.abs().max()), rtol=0.02)


@pytest.mark.parametrize("n", [1, 6])
def test_experts_that_are_not_quantised(ops: Ops, n: int) -> None:
    """Without blocks the routed experts run on kernels around the plain activation, the shared one is plain."""
    ids = torch.rand(n, 4, generator=torch.Generator().manual_seed(n)).argsort(-1)[:, :2]
    weights = draw(1, n, 2, dtype=torch.float32).abs()
    args = (draw(0, n, 32), ids, weights, draw(2, 4, 24, 32) / 6, draw(3, 4, 32, 12) / 4, 0.6)
    found, expected = ops.experts(*args), REFERENCE.experts(*args)
    assert float((found - expected).abs().max()) <= 0.02 * float(expected.abs().max())
    assert ops.expert is REFERENCE.expert


def test_streams_have_a_batch_axis(ops: Ops) -> None:
    """The mix back gives the plain values; on this chip its kernel takes no call without an axis in front."""
    args = (
        draw(0, 5, 4, 32),
        draw(1, 5, 32),
        draw(2, 5, 4, dtype=torch.float32),
        draw(3, 5, 4, 4, dtype=torch.float32),
    )
    found, expected = ops.update_streams(*args), REFERENCE.update_streams(*args)
    assert float((found - expected).abs().max()) <= 0.004 * float(expected.abs().max())


def test_adapters_call_the_kernels_of_the_a5(ops: Ops) -> None:
    """What the A5's adapters call, in order, without a read on the host."""
    ids, weights = torch.tensor([[0, 1], [3, 2]]), torch.ones(2, 2)
    blocks = mx_weight(draw(2, 4, 64, 32)), mx_weight(draw(3, 4, 32, 32))
    runs: dict[str, tuple[Any, list[str]]] = {
        "groups": (
            lambda: ops.grouped_linear(draw(0, 2, 2, 64), mx_weight(draw(1, 2, 8, 64))),
            ["npu::npu_dynamic_mx_quant", "npu::npu_transpose_quant_batchmatmul"],
        ),
        "experts": (
            lambda: ops.experts(draw(0, 2, 32), ids, weights, *blocks, 1.0),
            [
                "npu::npu_moe_init_routing_v2",
                "npu::npu_dynamic_mx_quant",
                "npu::npu_grouped_matmul",
                "custom::npu_swiglu_group_quant",
                "npu::npu_grouped_matmul",
                "npu::npu_moe_token_unpermute",
            ],
        ),
    }
    for run, expected in runs.values():
        with Recorder(("npu", "custom")) as seen:
            run()
        assert seen.names() == expected


def test_what_the_a5_can_multiply() -> None:
    """Products in blocks need their kernels, int8 weights are not for this chip, its plain activation is on purpose."""
    with machine_for(chip="a5"):
        providers = choose_providers("a5", installed_schemas())
        assert (takes_mx_output(providers), takes_mx_experts(providers), takes_int8(providers)) == (True, True, False)
        assert fallbacks(providers) == ()
        assert not providers.has("activate")
    for lacking, output in (("npu::npu_dynamic_mx_quant", False), ("custom::npu_swiglu_group_quant", True)):
        with machine_for(chip="a5", without=(lacking,)):
            providers = choose_providers("a5", installed_schemas())
            assert (takes_mx_output(providers), takes_mx_experts(providers)) == (output, False)
    with machine_for():
        providers = choose_providers("a3", installed_schemas())
        assert (takes_mx_output(providers), takes_mx_experts(providers), takes_int8(providers)) == (False, False, True)
