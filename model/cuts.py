"""Which part of every weight a rank holds.

A cut keeps ranges of one axis of a weight, in order. What no cut names is whole on every rank: low-rank query and
window projections, compressors, norms, mHC, router, expert tables.

====================== ============================== =================================================================
weight                 axis                           over
====================== ============================== =================================================================
embed                  vocabulary, padded             the ranks of a replica
head                   vocabulary, padded             all ranks, or those of a replica (``dp_lm_head``)
wq_b, attn_sink        heads                          the ranks of a replica
wo_a, wo_b             output groups, or the heads    the ranks of a replica; with more ranks than groups, several ranks
                       of one                         hold the same group and different heads of it
indexer                index heads                    the ranks of a replica
experts                width, or whole experts        all ranks
shared expert          width                          all ranks; whole on each of them with ``moe="ep"``
====================== ============================== =================================================================

Source: SGLang 0.5.23 ``models/deepseek_v4.py`` and ``layers/vocab_parallel_embedding.py``; decode-path sheet 6.3, 7.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any, Final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ..ops.collectives import Group
from ..ops.vocabulary import shard_rows
from ..state.config import Config
from ..state.errors import ConfigError
from ..state.parallel import Parallel
from .leaves import leaves_from_params, params_from_leaves
from .params import Params
from .ranks import Ranks

__all__ = [
    "Cut",
    "check_layout",
    "cut_params",
    "cut_shape",
    "leaf_cuts",
    "piece_parts",
    "placed_experts",
]

Ranges = tuple[tuple[int, int], ...]


@attrs.frozen
class Cut:
    """What is kept of one axis.

    Attributes:
        axis: of the weight.
        ranges: (start, stop) of what is kept, in the order in which it is held.
        size: length of the axis as held; what the ranges leave of it is padding at the end.
    """

    axis: int
    ranges: Ranges
    size: int

    def local(self, index: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Find the places at which indices of the whole axis are held, -1 for those that are not."""
        place = np.full(length, -1)
        kept = np.concatenate([np.arange(start, stop) for start, stop in self.ranges])
        place[kept] = np.arange(len(kept))
        return place[index]


def check_layout(config: Config, parallel: Parallel) -> None:
    """Refuse a layout that a model cannot be cut for.

    Raises:
        ConfigError: heads, groups, index heads, expert widths or experts cannot be dealt evenly.
    """
    tp, ranks, groups = parallel.tp, parallel.ranks, config.o_groups
    is_whole = groups % tp == 0 or tp % groups == 0
    _require(config.num_attention_heads % tp == 0 and is_whole, "num_attention_heads", "tp", tp, config)
    _require(not config.n_layers_of_ratio(4) or config.index_n_heads % tp == 0, "index_n_heads", "tp", tp, config)
    if parallel.moe == "tp":
        _require(config.moe_intermediate_size % ranks == 0, "moe_intermediate_size", "tp * dp", ranks, config)
    else:
        _require(config.n_routed_experts % ranks == 0, "n_routed_experts", "ep", ranks, config)
    expected = (config.num_hidden_layers, config.n_routed_experts)
    if parallel.placement and {(len(parallel.placement), len(one)) for one in parallel.placement} != {expected}:
        raise ConfigError(
            f"Parallel(placement): expected one permutation of {expected[1]} experts for each of {expected[0]} layers",
            field="placement",
            expected=expected,
            got=tuple(len(one) for one in parallel.placement),
        )


def _require(is_right: bool, field: str, by: str, n: int, config: Config) -> None:
    if not is_right:
        got = getattr(config, field)
        raise ConfigError(
            f"Parallel: cannot deal {field} = {got} (in {config.o_groups} output groups) to {by} = {n} ranks evenly; "
            "choose a number of ranks that divides it",
            field=field,
            expected=f"a multiple of {n}",
            got=got,
        )


def leaf_cuts(config: Config, ranks: Ranks, path: str) -> tuple[Cut, ...]:
    """Say which part of a weight a rank holds.

    Args:
        config: the model's numbers.
        ranks: the rank's place.
        path: of the weight, as in ``leaf_shapes``.
    Returns:
        Cuts of different axes; none for a weight that is whole on every rank.
    """
    if ranks.world.size == 1:
        return ()
    _, layer, field = path.split(".", 2) if path.startswith("layers.") else ("", "0", path)
    if field in _VOCABULARY:
        return _vocabulary_cut(config, ranks.attn if field == "embed" else ranks.head)
    if field in _HEADS:
        return _head_cuts(config, ranks.attn, field)
    if field in _EXPERTS and ranks.parallel.moe == "ep":
        return () if field.startswith("ffn.shared") else (_dealt_cut(config, ranks, int(layer)),)
    if field in _EXPERTS:
        return (_width_cut(config.moe_intermediate_size, *_EXPERTS[field], ranks.world),)
    return ()


_VOCABULARY: Final = ("embed", "head")
_HEADS: Final = (
    *("attn.wq_b", "attn.attn_sink", "attn.wo_a", "attn.wo_b"),
    *("attn.indexer.wq_b", "attn.indexer.weights_proj"),
)
_EXPERTS: Final = {"ffn.w13": (1, 2), "ffn.w2": (2, 1), "ffn.shared_w13": (0, 2), "ffn.shared_w2": (1, 1)}
"""Weights of experts: the axis of their width, and how many widths lie on it."""


def _vocabulary_cut(config: Config, group: Group) -> tuple[Cut, ...]:
    if group.size == 1:
        return ()
    rows = shard_rows(config.vocab_size, group.size)
    start, stop = (min((group.rank + i) * rows, config.vocab_size) for i in (0, 1))
    return (Cut(0, ((start, stop),), rows),)


def _head_cuts(config: Config, group: Group, field: str) -> tuple[Cut, ...]:
    tp, rank = group.size, group.rank
    if tp == 1:
        return ()
    heads, width = config.num_attention_heads // tp, config.head_dim
    if field in ("attn.wq_b", "attn.attn_sink"):
        return (_even_cut(0, heads * (width if field == "attn.wq_b" else 1), rank),)
    if field.startswith("attn.indexer"):
        own = config.index_n_heads // tp * (config.index_head_dim if field.endswith("wq_b") else 1)
        return (_even_cut(0, own, rank),)
    holders = max(1, tp // config.o_groups)  # ranks that hold one group together
    own = max(1, config.o_groups // tp) * config.o_lora_rank
    rows = _even_cut(0, own, rank // holders)
    if field == "attn.wo_b":
        return (attrs.evolve(rows, axis=1),)
    return (rows,) if holders == 1 else (rows, _even_cut(1, heads * width, rank % holders))


def _even_cut(axis: int, size: int, rank: int) -> Cut:
    return Cut(axis, ((rank * size, (rank + 1) * size),), size)


def _width_cut(width: int, axis: int, n_parts: int, group: Group) -> Cut:
    """Cut the width of an expert; gate and up projection lie behind each other and are cut alike."""
    own = width // group.size
    first = group.rank * own
    return Cut(
        axis, tuple((part * width + first, part * width + first + own) for part in range(n_parts)), n_parts * own
    )


def _dealt_cut(config: Config, ranks: Ranks, layer: int) -> Cut:
    own = config.n_routed_experts // ranks.world.size
    first = ranks.world.rank * own
    if not ranks.parallel.placement:
        return Cut(0, ((first, first + own),), own)
    holder = np.argsort(ranks.parallel.placement[layer])  # place -> expert
    return Cut(0, tuple((int(e), int(e) + 1) for e in holder[first : first + own]), own)


def cut_shape(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[int, ...]:
    """Return the shape of what a rank holds of a weight."""
    sizes = {cut.axis: cut.size for cut in cuts}
    return tuple(sizes.get(axis, n) for axis, n in enumerate(shape))


Index = tuple[int | slice, ...]


def piece_parts(
    shape: tuple[int, ...], block: Index, cuts: tuple[Cut, ...]
) -> Iterator[tuple[tuple[slice, ...] | None, Index]]:
    """List what a rank reads of one tensor of a checkpoint, and where it goes.

    Args:
        shape: of the whole weight.
        block: the part of the weight that the tensor is.
        cuts: of the weight.
    Yields:
        (part of the tensor, or None for all of it; place in what the rank holds).
    """
    if not cuts:
        yield None, block
        return
    by_axis = {cut.axis: cut for cut in cuts}
    choices: list[list[tuple[slice | None, int | slice]]] = []
    for axis, length in enumerate(shape):
        at: Any = block[axis] if axis < len(block) else slice(0, length)
        lo, hi = (at.start, at.stop) if isinstance(at, slice) else (at, at + 1)
        found = _overlaps(by_axis.get(axis), lo, hi)
        if isinstance(at, slice):
            choices.append([(slice(a - lo, b - lo), slice(to, to + b - a)) for a, b, to in found])
        else:
            choices.append([(None, to) for _, _, to in found])
    for parts in product(*choices):
        yield tuple(part for part, _ in parts if part is not None), tuple(place for _, place in parts)


def _overlaps(cut: Cut | None, lo: int, hi: int) -> list[tuple[int, int, int]]:
    """Find what is kept of [lo, hi): (start, stop, place of the start)."""
    if cut is None:
        return [(lo, hi, lo)]
    places = np.cumsum([0, *(stop - start for start, stop in cut.ranges)]).tolist()
    found = []
    for (start, stop), (place, _) in zip(cut.ranges, pairwise(places), strict=True):
        a, b = max(start, lo), min(stop, hi)
        if a < b:
            found.append((a, b, place + a - start))
    return found


def cut_params(config: Config, params: Params, ranks: Ranks) -> Params:
    """Take a rank's part of weights in memory.

    Args:
        config: the model's numbers.
        params: all weights.
        ranks: the rank's place.
    Returns:
        The part, in memory of its own: products on a CPU round by where their operands lie.
    Raises:
        ConfigError: a layout that the model cannot be cut for.
    """
    check_layout(config, ranks.parallel)
    cut = {}
    for path, leaf in leaves_from_params(params).items():
        cuts, shape = leaf_cuts(config, ranks, path), tuple(leaf.shape)
        cut[path] = torch.zeros(cut_shape(shape, cuts), dtype=leaf.dtype, device=leaf.device)
        for part, place in piece_parts(shape, (), cuts):
            cut[path][place].copy_(leaf if part is None else leaf[part])
    return placed_experts(params_from_leaves(cut), ranks.parallel)


def placed_experts(params: Params, parallel: Parallel) -> Params:
    """Note in every layer where its experts lie; nothing changes where they lie by number."""
    if not parallel.placement:
        return params
    layers = [
        attrs.evolve(layer, ffn=attrs.evolve(layer.ffn, place=torch.tensor(places)))
        for layer, places in zip(params.layers, parallel.placement, strict=True)
    ]
    return attrs.evolve(params, layers=tuple(layers))
