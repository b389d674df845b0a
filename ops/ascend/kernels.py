"""The operators of the kernel table on Ascend A2 and A3.

Every adapter has the signature of the plain function and calls one kernel, or the few that production calls for it.
What no installed package has stays the plain function, and so does what production computes plainly: hash routing, the
head's mix of streams, products with a floating-point weight, the head. Sampling stays plain as well: what its kernel
does with equal logits is not established, and a seeded choice must not depend on it. Weights of ``Int8Weight`` meet
rows quantised to int8.

Source: SGLang 0.5.23 ``hardware_backend/npu``; kernel sheet 2, 3, 6.4, 7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ...state.errors import ConfigError
from ..dispatch import REFERENCE, Ops
from ..linear import linear
from ..quantize import Int8Weight
from .experts import experts_here
from .paged import paged_ops, rotate
from .providers import Providers

__all__ = ["ascend_ops", "fallbacks", "takes_int8"]

BUILT: Final = ("a2", "a3")
"""Chips that the adapters are written for."""


def ascend_ops(providers: Providers) -> Ops:
    """Make the kernel table of a machine.

    Args:
        providers: of the machine.
    Returns:
        The table; its ``paged`` is None where a kernel that it needs is missing.
    Raises:
        ConfigError: a chip that the adapters are not written for.
    """
    if providers.chip not in BUILT:
        names = ", ".join(BUILT)
        raise ConfigError(
            f"chip: expected one of {names} for Ascend kernels, got {providers.chip!r}",
            field="chip",
            expected=names,
            got=providers.chip,
        )
    adapters = _Adapters(providers=providers)
    made: dict[str, Callable[..., Any]] = {
        operator: getattr(adapters, operator)
        for operator, needed in (_NEEDS | {"linear": _INT8}).items()
        if all(providers.has(name) for name in needed)
    }
    return attrs.evolve(REFERENCE, name="ascend", paged=paged_ops(providers), **made)


_NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "rms_norm": ("rms_norm",),
    "normalize_query": ("rms_norm",),
    "apply_rotary": ("rotate",),
    "enter_streams": ("mix_streams",),
    "update_streams": ("update_streams",),
    "grouped_linear": ("project_groups",),
    "route_scored": ("route",),
    "experts": ("init_routing", "grouped_matmul", "activate", "combine_rows"),
    "expert": ("activate",),
}
"""Operator of the kernel table -> the kernels that its adapter calls."""


_INT8: Final = ("quantize_rows", "quantised_linear")
"""Kernels of products with int8 weights; those with others are plain products."""


def takes_int8(providers: Providers) -> bool:
    """Tell whether every operator that may meet an int8 weight has its kernels."""
    needed = (*_INT8, *_NEEDS["experts"], *_NEEDS["expert"])
    return all(providers.has(name) for name in needed)


def fallbacks(providers: Providers) -> tuple[str, ...]:
    """List the operators of the kernel table that stay plain because no installed package has a kernel for them."""
    plain = [operator for operator, needed in _NEEDS.items() if not all(providers.has(name) for name in needed)]
    return (*plain, *(() if paged_ops(providers) else ("paged attention",)))


@attrs.frozen(eq=False, kw_only=True)
class _Adapters:
    """Operators as methods of what they run on."""

    providers: Providers

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale to unit root mean square; see ``norms.rms_norm``."""
        if not x.numel():
            return x
        y: Tensor = self.providers["rms_norm"](x=x.contiguous(), weight=weight, eps=eps)[0]
        return y

    def normalize_query(self, q: Tensor, eps: float, *, rounding: bool | str) -> Tensor:
        """Scale every head to unit root mean square; see ``norms.normalize_query``. The kernel rounds once."""
        assert not rounding, "the numerics of Ascend kernels round once"
        # There is no kernel without a weight.
        return self.rms_norm(q, q.new_ones(q.shape[-1], dtype=torch.float32), eps)

    def apply_rotary(self, x: Tensor, factors: Tensor) -> Tensor:
        """Rotate the last R channels of a copy; see ``rotary.apply_rotary``."""
        if not x.numel():
            return x
        turns = torch.view_as_real(factors.resolve_conj()).expand(*x.shape[:-1], -1, -1)
        cos, sin = (part.repeat_interleave(2, -1).flatten(0, -2) for part in turns.unbind(-1))
        rows = x.flatten(0, -2).clone(memory_format=torch.contiguous_format)
        return rotate(self.providers, rows, cos, sin).view(x.shape)

    def enter_streams(
        self, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, n_iters: int, eps: float, norm_eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute what a sublayer reads and how its output comes back; see ``streams.enter_streams``."""
        y, post, comb = self.providers["mix_streams"](
            x=streams.contiguous(), fn=fn, base=base, scale=scale, n_iters=n_iters, eps=eps, norm_eps=norm_eps
        )
        return y, post, comb

    def update_streams(self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Mix the streams and add the sublayer's output; see ``streams.update_streams``."""
        operator = self.providers["update_streams"]
        given = {"x": y, "residual": streams, "post": post, "comb": comb}
        given = {name: x.contiguous() for name, x in given.items()}
        if operator.binding.provider != "vllm-ascend":
            mixed: Tensor = operator(**given)
            return mixed
        # This package's operator wants a batch axis in front.
        batched: Tensor = operator(**{name: x.unsqueeze(0) for name, x in given.items()})
        return batched.squeeze(0)

    def grouped_linear(self, x: Tensor, w: Tensor) -> Tensor:
        """Multiply every group by its own weight; see ``linear.grouped_linear``.

        The kernel wants the weight as [G,D,U]; a weight that is stored so costs no copy.
        """
        y: Tensor = self.providers["project_groups"](x=x.contiguous(), w=w.transpose(1, 2).contiguous())
        return y

    def route_scored(self, logits: Tensor, bias: Tensor, count: int, factor: float) -> tuple[Tensor, Tensor]:
        """Choose and weigh experts; see ``router.route_scored``."""
        weights, ids, _ = self.providers["route"](
            logits=logits.contiguous(), count=count, bias=bias, factor=factor, eps=1e-20, out_flag=False
        )
        return ids.long(), weights

    def linear(self, x: Tensor, w: Tensor | Int8Weight) -> Tensor:
        """Multiply rows by a weight; see ``linear.linear``."""
        if not isinstance(w, Int8Weight):
            return linear(x, w)
        codes, scales = self.providers["quantize_rows"](x=x.flatten(0, -2).contiguous())
        y: Tensor = self.providers["quantised_linear"](
            x=codes, w=w.codes.t(), w_scale=w.scales, x_scale=scales, output_dtype=x.dtype
        )
        return y.unflatten(0, x.shape[:-1])

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        w13: Tensor | Int8Weight,
        w2: Tensor | Int8Weight,
        limit: float,
    ) -> Tensor:
        """Run the experts that were hit; see ``experts.experts_sorted``."""
        return experts_here(self.providers, x, ids, weights, w13, w2, limit)

    def expert(self, x: Tensor, w13: Tensor | Int8Weight, w2: Tensor | Int8Weight, limit: float | None) -> Tensor:
        """Run one expert on every row; see ``experts.expert``."""
        assert limit is not None, "the numerics of Ascend kernels clamp the shared expert"
        return self.linear(self.providers["activate"](x=self.linear(x, w13), limit=limit), w2)
