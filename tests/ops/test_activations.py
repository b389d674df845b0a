"""Activations: the values of float64, the same bits at every place, and gradients that stay finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.steps import examples
from purestep.ops import activations
from torch.nn import functional as F

PEERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sigmoid": (activations.sigmoid, torch.sigmoid),
    "silu": (activations.silu, F.silu),
    "softplus": (activations.softplus, F.softplus),
}
EDGES = torch.tensor([-1e4, -104.0, -89.0, -80.0, -20.5, -1e-6, 0.0, 1e-6, 19.999, 20.0, 20.001, 89.0, 1e4])


@pytest.mark.parametrize("name", PEERS)
def test_values_and_gradients_are_those_of_float64(name: str) -> None:
    """Within float32 rounding over the whole range, at the borders of its branches and beyond what exp can hold."""
    ours, theirs = PEERS[name]
    x = torch.cat((EDGES, torch.linspace(-30, 30, 1001))).requires_grad_()
    wide = x.detach().double().requires_grad_()
    found, expected = ours(x), theirs(wide)
    torch.testing.assert_close(found.double(), expected, atol=1e-30, rtol=3e-6)
    (slope,) = torch.autograd.grad(found.sum(), x)
    (true,) = torch.autograd.grad(expected.sum(), wide)
    assert slope.isfinite().all()
    torch.testing.assert_close(slope.double(), true, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", PEERS)
@given(seed=st.integers(0, 999), n=st.integers(1, 70), at=st.integers(0, 69))
@examples(60)
def test_bits_do_not_depend_on_the_place(name: str, seed: int, n: int, at: int) -> None:
    """A number alone, at any place and in any company gives the same bits."""
    ours = PEERS[name][0]
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 8
    at %= n
    assert torch.equal(ours(x)[at : at + 1], ours(x[at : at + 1].clone()))
