"""Every adapter on the simulator against the plain operator of its name: values, purity, strides, empty batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from ascend_sim.recorder import Recorder
from ascend_sim.simulator import PACKAGES, simulate
from kit.ascend import machine_for
from purestep.ops import rotary
from purestep.ops.ascend.kernels import ascend_ops, fallbacks
from purestep.ops.ascend.paged import paged_ops
from purestep.ops.ascend.providers import CHIPS, choose_providers, installed_schemas
from purestep.ops.dispatch import REFERENCE, Ops
from purestep.ops.quantize import Int8Weight, int8_weight
from purestep.state.errors import ConfigError
from torch import Tensor

BF16 = torch.bfloat16
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def draw(seed: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def ops() -> Iterator[Ops]:
    """The kernel table of a simulated A3."""
    with machine_for():
        yield ascend_ops(choose_providers("a3", installed_schemas()))


def _arguments(n: int) -> dict[str, Arguments]:
    """Arguments of every operator that has an adapter, on ``n`` rows."""
    f32 = torch.float32
    factors = rotary.rotary_factors(torch.arange(n) * 7, rotary.rotary_frequencies(8, 100.0))
    ids = torch.rand(n, 4, generator=torch.Generator().manual_seed(n)).argsort(-1)[:, :2]
    mhc = {"n_iters": 20, "eps": 1e-6, "norm_eps": 1e-6}
    weights = draw(1, n, 2, dtype=f32).abs()
    return {
        "rms_norm": ((draw(0, n, 32), draw(1, 32, dtype=f32), 1e-6), {}),
        "normalize_query": ((draw(0, n, 4, 16), 1e-6), {"rounding": False}),
        "apply_rotary": ((draw(0, n, 4, 16), factors.unsqueeze(1)), {}),
        "enter_streams": (
            (draw(0, n, 4, 32), draw(1, 24, 128, dtype=f32) / 11, draw(2, 24, dtype=f32), draw(3, 3, dtype=f32)),
            mhc,
        ),
        "update_streams": (
            (draw(0, n, 4, 32), draw(1, n, 32), draw(2, n, 4, dtype=f32), draw(3, n, 4, 4, dtype=f32)),
            {},
        ),
        "grouped_linear": ((draw(0, n, 2, 32), draw(1, 2, 16, 32) / 6), {}),
        "route_scored": ((draw(0, n, 9, dtype=f32), draw(1, 9, dtype=f32), 3, 2.5), {}),
        "experts": ((draw(0, n, 32), ids, weights, draw(2, 4, 24, 32) / 6, draw(3, 4, 32, 12) / 4, 0.6), {}),
        "expert": ((draw(0, n, 32), draw(1, 24, 32) / 6, draw(2, 32, 12) / 4, 0.6), {}),
    }


ADAPTERS = tuple(_arguments(1))

TOLERANCES = {
    "apply_rotary": 0.0,
    "route_scored": 1e-6,
    "rms_norm": 0.004,
    "normalize_query": 0.004,
    "grouped_linear": 0.004,
    "update_streams": 0.004,
    "enter_streams": 0.01,
    "experts": 0.02,
    "expert": 0.02,
}
"""Largest difference as a share of the largest value: one rounding to bfloat16 is 0.004; mHC multiplies with 10
mantissa bits; experts round their hidden rows and outputs once more."""


def outputs(result: Any) -> tuple[Tensor, ...]:
    """The tensors of a result."""
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("n", [1, 5, 33])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_equal_the_plain_operators(ops: Ops, name: str, n: int) -> None:
    """An adapter gives the plain operator's values within its tolerance, in the same dtypes and shapes."""
    args, options = _arguments(n)[name]
    assert getattr(ops, name) is not getattr(REFERENCE, name)
    found = outputs(getattr(ops, name)(*args, **options))
    expected = outputs(getattr(REFERENCE, name)(*args, **options))
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if x.dtype is torch.int64:
            assert torch.equal(x, y)
        else:
            assert float((x - y).abs().max()) <= TOLERANCES[name] * float(y.abs().max())


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_change_no_argument(ops: Ops, name: str) -> None:
    """An adapter leaves its arguments as they were and repeats itself to the bit."""
    args, options = _arguments(6)[name]
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    once, again = (outputs(getattr(ops, name)(*args, **options)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(once, again, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(args, before, strict=True) if isinstance(x, Tensor))


@pytest.mark.parametrize("name", ADAPTERS)
def test_strided_rows_give_the_results_of_contiguous_ones(ops: Ops, name: str) -> None:
    """Activations that are slices or transposes of something else give the bits that contiguous ones give."""
    args, options = _arguments(6)[name]
    expected = outputs(getattr(ops, name)(*args, **options))
    n_rows = 2 if name == "update_streams" else 1
    for change in (_every_other_row, _transposed):
        strided = [change(a) if i < n_rows and isinstance(a, Tensor) else a for i, a in enumerate(args)]
        assert not strided[0].is_contiguous()
        found = outputs(getattr(ops, name)(*strided, **options))
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def _every_other_row(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 0)[::2]


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def test_rotation_takes_conjugates_and_rows_without_heads(ops: Ops) -> None:
    """Conjugated factors rotate back, and rows of one vector each are rotated like heads."""
    factors = rotary.rotary_factors(torch.arange(5), rotary.rotary_frequencies(8, 100.0))
    x = draw(0, 5, 16)
    turned = ops.apply_rotary(x, factors)
    assert torch.equal(turned, REFERENCE.apply_rotary(x, factors))
    assert torch.equal(ops.apply_rotary(turned, factors.conj()), REFERENCE.apply_rotary(turned, factors.conj()))


def test_norm_accepts_no_rows(ops: Ops) -> None:
    """A step that keeps no row for the head asks for the norm of nothing."""
    assert ops.rms_norm(draw(0, 0, 32), draw(1, 32), 1e-6).shape == (0, 32)


def test_shared_expert_clamps(ops: Ops) -> None:
    """Values beyond the limit are cut as the plain operator cuts them."""
    w13, w2, x = 50 * torch.eye(32, dtype=BF16)[:8], torch.eye(32, dtype=BF16)[:, :4].contiguous(), draw(0, 9, 32)
    found = ops.expert(x, w13, w2, 10.0)
    torch.testing.assert_close(found, REFERENCE.expert(x, w13, w2, 10.0), atol=0.5, rtol=0.01)
    assert float(found.abs().max()) <= 100.0
    assert float(REFERENCE.expert(x, w13, w2, None).abs().max()) > 200.0


def _dequantised(w: Int8Weight) -> Tensor:
    return w.codes.float() * w.scales.unsqueeze(-1)


def test_int8_weights_are_rounded_by_channel() -> None:
    """Codes times scales are the weight within half a step of its channel, and a channel of zeros stays zero."""
    w = torch.cat((draw(0, 5, 16), torch.zeros(1, 16, dtype=BF16)))
    found = int8_weight(w)
    assert (found.codes.dtype, found.scales.dtype) == (torch.int8, torch.float32)
    assert ((_dequantised(found) - w.float()).abs() <= 0.51 * found.scales.unsqueeze(-1)).all()
    assert not _dequantised(found)[-1].any()


@pytest.mark.parametrize("lead", [(5,), (2, 3)])
def test_products_with_int8_weights(ops: Ops, lead: tuple[int, ...]) -> None:
    """A row quantised to int8 meets an int8 weight: the sum of integers times both scales, rounded once."""
    x, w = draw(0, *lead, 32), int8_weight(draw(1, 12, 32))
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    codes = (x.float() / scale).round()
    expected = (codes @ w.codes.float().t() * w.scales * scale).to(BF16)
    found = ops.linear(x, w)
    assert (found.shape, found.dtype) == (expected.shape, BF16)
    assert float((found - expected).abs().max()) <= 0.004 * float(expected.abs().max())
    plain = ops.linear(x, _dequantised(w).to(BF16))
    assert float((found - plain).abs().max()) <= 0.03 * float(plain.abs().max())


@pytest.mark.parametrize("n", [1, 6])
def test_experts_with_int8_weights(ops: Ops, n: int) -> None:
    """Routed and shared experts with int8 weights equal those with the weights that the codes stand for."""
    (x, ids, weights, w13, w2, limit), _ = _arguments(n)["experts"]
    w13, w2 = int8_weight(w13), int8_weight(w2)
    wide = (_dequantised(w13).to(BF16), _dequantised(w2).to(BF16))
    for found, expected in (
        (ops.experts(x, ids, weights, w13, w2, limit), ops.experts(x, ids, weights, *wide, limit)),
        (
            ops.expert(x, Int8Weight(*(p[0] for p in w13)), Int8Weight(*(p[0] for p in w2)), limit),
            ops.expert(x, wide[0][0], wide[1][0], limit),
        ),
    ):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert float((found - expected).abs().max()) <= 0.05 * float(expected.abs().max())


def test_what_is_missing_stays_plain() -> None:
    """An operator that no installed package has stays the plain function; the others keep their kernels."""
    with machine_for(without=("custom::npu_hc_pre", "npu::npu_moe_token_unpermute")):
        chosen = choose_providers("a3", installed_schemas())
        ops = ascend_ops(chosen)
        assert ops.enter_streams is REFERENCE.enter_streams
        assert ops.experts is REFERENCE.experts
        assert ops.expert is not REFERENCE.expert
        assert ops.paged is not None
        assert fallbacks(chosen) == ("enter_streams", "experts")


@pytest.mark.parametrize("missing", ["npu::compressor", "custom::npu_quant_lightning_indexer_metadata"])
def test_paged_kernels_come_together_or_not_at_all(missing: str) -> None:
    """Without one of the kernels that share the form of the caches, the sublayer is made of plain functions."""
    with machine_for(without=(missing,)):
        chosen = choose_providers("a3", installed_schemas())
        assert paged_ops(chosen) is None
        assert ascend_ops(chosen).paged is None
        assert fallbacks(chosen) == ("paged attention",)


def test_streams_of_the_other_package_get_their_batch_axis() -> None:
    """Where only the other package has the mHC kernels, its operator is given the leading axis that it wants."""
    packages = (*PACKAGES, "vllm-ascend")
    without = ("custom::npu_hc_pre", "custom::npu_hc_post")
    with simulate(chip="a3", providers=packages, heads=4, strict_sizes=False, without=without):
        chosen = choose_providers("a3", installed_schemas())
        assert chosen["update_streams"].binding.provider == "vllm-ascend"
        ops = ascend_ops(chosen)
        for name in ("enter_streams", "update_streams"):
            args, options = _arguments(5)[name]
            found = outputs(getattr(ops, name)(*args, **options))
            expected = outputs(getattr(REFERENCE, name)(*args, **options))
            for x, y in zip(found, expected, strict=True):
                assert float((x - y).abs().max()) <= TOLERANCES[name] * float(y.abs().max())


def test_chips_that_are_not_built() -> None:
    """The adapters are written for every chip that has providers, and refuse any other by name."""
    for chip in CHIPS:
        with machine_for(chip=chip):
            providers = choose_providers(chip, installed_schemas())
            assert ascend_ops(providers).paged is not None
            with pytest.raises(ConfigError, match="expected one of a2, a3, a5 for Ascend kernels, got 'a6'"):
                ascend_ops(attrs.evolve(providers, chip="a6"))


def test_adapters_call_their_kernels(ops: Ops) -> None:
    """Every adapter calls the kernels that it is said to need, in order, and nothing of another provider."""
    expected: dict[str, list[str]] = {
        "rms_norm": ["npu::npu_rms_norm"],
        "normalize_query": ["npu::npu_rms_norm"],
        "apply_rotary": ["custom::inplace_partial_rotary_mul"],
        "enter_streams": ["custom::npu_hc_pre"],
        "update_streams": ["custom::npu_hc_post"],
        "grouped_linear": ["npu::npu_transpose_batchmatmul"],
        "route_scored": ["custom::npu_moe_gating_top_k"],
        "experts": [
            "npu::npu_moe_init_routing_v2",
            "npu::npu_grouped_matmul",
            "npu::npu_clipped_swiglu",
            "npu::npu_grouped_matmul",
            "npu::npu_moe_token_unpermute",
        ],
        "expert": ["npu::npu_clipped_swiglu"],
    }
    assert set(expected) == set(ADAPTERS)
    for name, calls in expected.items():
        assert recorded(lambda name=name: call(ops, name)) == calls


def call(ops: Ops, name: str) -> None:
    """Call an operator on a few rows."""
    args, options = _arguments(4)[name]
    getattr(ops, name)(*args, **options)


def recorded(run: Callable[[], None]) -> list[str]:
    """Names of the kernels that a call reached; it may not read anything on the host."""
    with Recorder({"npu", "custom", "_C_ascend"}) as seen:
        run()
    return seen.names()
