"""The kernel table: which implementation each operator has, chosen once and carried in the model.

Every operator is a function on plain tensors with one signature, whatever implements it; the plain version of each is
named in ``REFERENCE``. Another table is ``attrs.evolve`` of it, so a fused or device kernel joins without a change in
``model/``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import attrs
import torch
from torch import Tensor

from ..state.errors import ConfigError
from . import (
    attention,
    chunks,
    compressor,
    experts,
    fused,
    indexer,
    invariant,
    linear,
    norms,
    quantize,
    rotary,
    router,
    stored,
    streams,
    traced,
    vocabulary,
)

__all__ = [
    "DIFFERENTIABLE",
    "FUSED",
    "INVARIANT",
    "REFERENCE",
    "TRACED",
    "Ops",
    "PagedOps",
    "kernel_table",
    "with_stored",
]

Kernel = Callable[..., Tensor]
Kernels2 = Callable[..., tuple[Tensor, Tensor]]
Kernels3 = Callable[..., tuple[Tensor, Tensor, Tensor]]


@attrs.frozen(eq=False, kw_only=True)
class PagedOps:
    """Kernels that read and write whole caches by tables of pages; signatures are those of ``ops/ascend/paged.py``.

    A kernel table that has them runs its attention sublayer through them (``model/ascend.py``).

    Attributes:
        form: of the caches, as ``KVLayout.form``.
        scale_dtype: of the scales of index keys and queries, and of the heads' weights.
    """

    form: Literal["ascend", "packed"]
    scale_dtype: torch.dtype
    rotate: Kernel
    compress: Kernels2
    window_slots: Kernel
    entry_slots: Kernel
    write_window: Kernel
    write_entries: Kernel
    write_keys: Kernels2
    quantize_query: Kernels2
    index_metadata: Kernel
    pick_entries: Kernel
    attention_metadata: Kernel
    attend: Kernel


@attrs.frozen(eq=False, kw_only=True)
class Ops:
    """One implementation of every operator; signatures are those of the reference functions of the same name.

    ``paged`` is None where the attention sublayer is made of the operators above it (``model/paged.py``).
    """

    name: str
    embed_rows: Kernel
    cut_vocabulary: Kernel
    linear: Kernel
    grouped_linear: Kernel
    rms_norm: Kernel
    normalize_query: Kernel
    rotary_factors: Callable[..., Any]
    apply_rotary: Kernel
    enter_streams: Kernels3
    join_streams: Kernel
    update_streams: Kernel
    head_weights: Kernel
    pool_group: Kernel
    fold_member: Kernel
    index_scores: Kernel
    pick_entries: Kernel
    attend: Kernel
    attend_chunk: Kernel
    route_scored: Kernels2
    route_hash: Kernels2
    experts: Kernel
    expert: Kernel
    hadamard: Kernel
    round_fp8: Kernel
    round_fp8_rows: Kernel
    round_int8_rows: Kernel
    round_fp4: Kernel
    paged: PagedOps | None = None


REFERENCE: Final = Ops(
    name="reference",
    embed_rows=vocabulary.embed_rows,
    cut_vocabulary=vocabulary.cut_vocabulary,
    linear=linear.linear,
    grouped_linear=linear.grouped_linear,
    rms_norm=norms.rms_norm,
    normalize_query=norms.normalize_query,
    rotary_factors=rotary.rotary_factors,
    apply_rotary=rotary.apply_rotary,
    enter_streams=streams.enter_streams,
    join_streams=streams.join_streams,
    update_streams=streams.update_streams,
    head_weights=streams.head_weights,
    pool_group=compressor.pool_group,
    fold_member=compressor.fold_member,
    index_scores=indexer.index_scores,
    pick_entries=indexer.pick_entries,
    attend=attention.attend,
    attend_chunk=attention.attend_chunk,
    route_scored=router.route_scored,
    route_hash=router.route_hash,
    experts=experts.experts_sorted,
    expert=experts.expert,
    hadamard=quantize.hadamard,
    round_fp8=quantize.round_fp8,
    round_fp8_rows=quantize.round_fp8_rows,
    round_int8_rows=quantize.round_int8_rows,
    round_fp4=quantize.round_fp4,
)
"""One plain version of every operator."""

DIFFERENTIABLE: Final = attrs.evolve(REFERENCE, name="differentiable", experts=experts.experts_dense)
"""The same with static shapes everywhere, so that ``torch.func`` transforms go through."""

FUSED: Final = attrs.evolve(
    REFERENCE,
    name="fused",
    linear=fused.linear,
    grouped_linear=fused.grouped_linear,
    rms_norm=fused.rms_norm,
    normalize_query=fused.normalize_query,
    apply_rotary=fused.apply_rotary,
    enter_streams=fused.enter_streams,
    update_streams=chunks.update_streams,
    index_scores=chunks.index_scores,
    pick_entries=fused.pick_entries,
    attend_chunk=chunks.attend_chunk,
    experts=fused.experts_sorted,
    expert=fused.expert,
)
"""What runs on a CPU by default; equal to the reference within rounding."""

TRACED: Final = attrs.evolve(
    REFERENCE,
    name="traced",
    linear=traced.linear,
    grouped_linear=traced.grouped_linear,
    rotary_factors=traced.rotary_factors,
    apply_rotary=traced.apply_rotary,
    enter_streams=traced.enter_streams,
    join_streams=traced.join_streams,
    update_streams=traced.update_streams,
    pick_entries=fused.pick_entries,
    route_scored=traced.route_scored,
    experts=traced.experts,
    expert=traced.expert,
)
"""What compiled graphs are made of; equal to the reference within rounding."""

INVARIANT: Final = attrs.evolve(
    REFERENCE,
    name="invariant",
    linear=invariant.linear,
    grouped_linear=invariant.grouped_linear,
    rms_norm=invariant.by_rows(REFERENCE.rms_norm, 1),
    normalize_query=invariant.by_rows(REFERENCE.normalize_query, 1),
    apply_rotary=invariant.by_rows(REFERENCE.apply_rotary, 2),
    enter_streams=invariant.by_rows(REFERENCE.enter_streams, 1),
    join_streams=invariant.by_rows(REFERENCE.join_streams, 2),
    update_streams=invariant.by_rows(REFERENCE.update_streams, 4),
    head_weights=invariant.by_rows(REFERENCE.head_weights, 1),
    pool_group=invariant.by_rows(REFERENCE.pool_group, 2),
    fold_member=invariant.by_rows(REFERENCE.fold_member, 3),
    index_scores=invariant.index_scores,
    attend=invariant.attend,
    attend_chunk=invariant.attend_chunk,
    route_scored=invariant.by_rows(REFERENCE.route_scored, 1),
    route_hash=invariant.by_rows(REFERENCE.route_hash, 2),
    experts=invariant.by_rows(invariant.experts_sorted, 3),
    expert=invariant.by_rows(REFERENCE.expert, 1),
    hadamard=invariant.by_rows(REFERENCE.hadamard, 1),
)
"""What ``Numerics(invariant=True)`` runs: every row alone, bit for bit."""

_TABLES: Final[Mapping[str, Ops]] = {"reference": REFERENCE, "fused": FUSED}

_STORED: Final[Mapping[str, stored.StoredKernels]] = {
    "reference": stored.reference_kernels,
    "fused": stored.fused_kernels,
    "invariant": stored.invariant_kernels,
}


def with_stored(ops: Ops) -> Ops:
    """Let a kernel table of this package take weights as releases store them, too."""
    kernels = _STORED[ops.name]
    return attrs.evolve(
        ops,
        linear=kernels.linear,
        grouped_linear=kernels.grouped_linear,
        experts=kernels.experts,
        expert=kernels.expert,
    )


def kernel_table(name: str | None, device: str, *, invariant: bool) -> Ops:
    """Choose a kernel table of this package; those of Ascend follow from what is installed (``ops/ascend``).

    Args:
        name: "reference", "fused", or None for the fastest that fits.
        device: device type of the weights.
        invariant: whether rows must not depend on their company.
    Returns:
        The table.
    Raises:
        ConfigError: no such table, or one that cannot keep the promise.
    """
    if name is not None and name not in _TABLES:
        names = ", ".join((*_TABLES, "ascend"))
        raise ConfigError(f"kernels: expected one of {names}, got {name!r}", field="kernels", expected=names, got=name)
    if invariant:
        if name == "fused":
            raise ConfigError(
                "kernels: fused kernels do not promise row-independent arithmetic; leave kernels out when "
                "Numerics(invariant=True)",
                field="kernels",
                expected="reference",
                got=name,
            )
        return INVARIANT
    if name is None:
        name = "fused" if device == "cpu" else "reference"
    return _TABLES[name]
