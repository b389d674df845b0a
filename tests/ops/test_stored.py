"""Operators on stored weights give what they give on the same weights expanded before."""

from __future__ import annotations

from typing import Any

import attrs
import oracle.formats as slow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.steps import examples
from purestep.ops import tiles
from purestep.ops.dispatch import FUSED, INVARIANT, REFERENCE, Ops, with_stored
from purestep.ops.formats import E8M0, Fp4Weight, Fp8Weight, StoredWeight, expand, fp4_weight, fp8_weight
from torch import Tensor

TABLES = {"reference": REFERENCE, "fused": FUSED, "invariant": INVARIANT}
WIDTHS = st.sampled_from([(8, 6), (128, 128), (130, 64), (256, 384)])


def draw(seed: int, *shape: int) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(seed: int, *shape: int, fp4: bool) -> StoredWeight:
    """A random weight in one of the two formats."""
    return (fp4_weight if fp4 else fp8_weight)(draw(seed, *shape) * shape[-1] ** -0.5)


def assert_same(name: str, got: Tensor, expected: Tensor) -> None:
    """Demand equal bits, but of the fast kernels, which sum in another order."""
    assert got.dtype is expected.dtype
    if name == "fused":
        atol = 2e-5 if got.dtype is torch.float32 else 3e-2
        torch.testing.assert_close(got, expected, atol=atol, rtol=1e-2 if got.dtype is torch.bfloat16 else 2e-5)
    else:
        assert torch.equal(got, expected)


def plain(ops: Ops, w: StoredWeight, dtype: torch.dtype) -> tuple[Ops, Tensor]:
    """The same table without stored weights, and the weight expanded."""
    return ops, expand(w, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TABLES)
@given(seed=st.integers(0, 99), shape=WIDTHS, rows=st.sampled_from([1, 3, 9]), fp4=st.booleans())
@examples(6)
def test_linear(name: str, dtype: torch.dtype, seed: int, shape: tuple[int, int], rows: int, fp4: bool) -> None:
    """A product with a stored weight is the product with its numbers; a plain weight goes the plain way."""
    w, x = stored(seed, *shape, fp4=fp4), draw(seed + 1, rows, shape[1]).to(dtype)
    ops, wide = plain(TABLES[name], w, dtype)
    assert_same(name, with_stored(ops).linear(x, w), ops.linear(x, wide))
    assert torch.equal(with_stored(ops).linear(x, wide), ops.linear(x, wide))


@pytest.mark.parametrize("name", TABLES)
@given(seed=st.integers(0, 99), sizes=st.sampled_from([(2, 5, 6), (2, 128, 256), (4, 64, 128)]), rows=st.integers(1, 3))
@examples(6)
def test_grouped_linear(name: str, seed: int, sizes: tuple[int, int, int], rows: int) -> None:
    """Every group of channels meets its own rows, also where a block spans two groups."""
    groups, low, wide_in = sizes
    w, x = stored(seed, groups * low, wide_in, fp4=False), draw(seed + 1, rows, groups, wide_in)
    ops, wide = plain(TABLES[name], w, torch.float32)
    expected = ops.grouped_linear(x, wide.unflatten(0, (groups, low)))
    assert_same(name, with_stored(ops).grouped_linear(x, w), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TABLES)
@given(
    seed=st.integers(0, 99),
    sizes=st.sampled_from([(8, 6), (128, 128), (32, 160)]),
    rows=st.sampled_from([0, 1, 5, 17]),
    fp4=st.booleans(),
)
@examples(5)
def test_experts(name: str, dtype: torch.dtype, seed: int, sizes: tuple[int, int], rows: int, fp4: bool) -> None:
    """Routed and shared experts with stored weights are those with their numbers."""
    hidden, inter = sizes
    n_experts, chosen = 4, 2
    pair = [stored(seed + e, inter, hidden, fp4=fp4) for e in range(2 * n_experts)]
    w13 = stack_pairs(pair)
    w2 = stored(seed + 50, n_experts, hidden, inter, fp4=fp4)
    x = draw(seed + 1, rows, hidden).to(dtype)
    ids = torch.rand(rows, n_experts, generator=torch.Generator().manual_seed(seed)).argsort(-1)[:, :chosen]
    weights = draw(seed + 2, rows, chosen).abs()
    ops = TABLES[name]
    table = with_stored(ops)
    wide13, wide2 = expand(w13, dtype), expand(w2, dtype)
    got = table.experts(x, ids, weights, w13, w2, 10.0)
    assert_same(name, got.to(dtype), ops.experts(x, ids, weights, wide13, wide2, 10.0).to(dtype))
    one13, one2 = type(w13)(w13.codes[0], w13.scales[0]), type(w2)(w2.codes[0], w2.scales[0])
    if rows:
        assert_same(name, table.expert(x, one13, one2, None), ops.expert(x, wide13[0], wide2[0], None))


def stack_pairs(parts: list[Any]) -> StoredWeight:
    """Put gate and up projections of every expert under each other, each with blocks of its own."""
    axis = -2 if isinstance(parts[0], Fp4Weight) else -3
    pairs = [
        (
            torch.cat([a.codes, b.codes], dim=-2),
            torch.cat([a.scales.view(torch.uint8), b.scales.view(torch.uint8)], axis),
        )
        for a, b in zip(parts[::2], parts[1::2], strict=True)
    ]
    codes, scales = (torch.stack(part) for part in zip(*pairs, strict=True))
    return type(parts[0])(codes, scales.view(E8M0))


def test_tiles_decode_every_code() -> None:
    """The fast decoders give the numbers of the slow one for every code and every scale within their range."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    finite = torch.where((bytes_ & 127) == 127, 0, bytes_).view(torch.float8_e4m3fn)
    codes = finite.repeat(128, 1)
    for scale in range(0, 247):
        scales = torch.full((1, 2), scale, dtype=torch.uint8).view(E8M0)
        whole = Fp8Weight(codes, scales.unsqueeze(0))
        assert torch.equal(tiles.decode_fp8(codes, scales), expand(whole, torch.float32))
    for scale in range(0, 241):
        scales = torch.full((1, 16), scale, dtype=torch.uint8).view(E8M0)
        rows = slow.decode_fp4([bytes_.tolist()], [[slow.e8m0(scale)] * 16])
        expected = torch.tensor(rows).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        assert torch.equal(tiles.decode_fp4(bytes_.unsqueeze(0), scales), expected)


def test_tiles_are_cut_by_rows() -> None:
    """A weight of several tiles is multiplied whole, rows in order."""
    for fp4 in (False, True):
        w, x = stored(0, 384, 8192, fp4=fp4), draw(1, 2, 8192)
        assert 2 * tiles.TILE < 384 * 8192
        torch.testing.assert_close(tiles.linear(x, w), x @ expand(w, torch.float32).T, atol=2e-5, rtol=2e-5)


def test_compiled_experts() -> None:
    """The routed experts are one opaque operator: they go through a compiler without a break."""
    w13, w2 = stored(0, 3, 8, 4, fp4=True), stored(1, 3, 4, 4, fp4=True)
    ops = with_stored(attrs.evolve(REFERENCE))
    x, ids, weights = draw(2, 5, 4), torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)

    def run(x: Tensor) -> Tensor:
        return ops.experts(x, ids, weights, w13, w2, 10.0) * 2

    assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(x), run(x))
