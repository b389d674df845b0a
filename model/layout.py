"""Which tensors a checkpoint holds: names, shapes and kinds, computed from the configuration alone.

The tables here are the only source of names and shapes: they serve the checks at loading, the writing, the random
initialisation and the parameter counts. A name in a table is relative to its layer unless its leaf belongs to the model
as a whole. A name with ``{e}`` stands for one tensor an expert, an index of the leaf's first axis. Two names split the
rows of the leaf's matrices between two tensors, in that order.

Names come in three dialects. ``official`` is the release's own. ``modules`` is transformers' module tree. ``saved`` is
what transformers' ``save_pretrained`` writes: official names inside layers, with another one for the key/value norm.

Source: DeepSeek-V4 release, ``model.safetensors.index.json`` and ``inference/model.py``; transformers 5.24,
``models/deepseek_v4/modeling_deepseek_v4.py`` and ``conversion_mapping.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Final, Literal

import attrs

from ..state.config import Config

__all__ = [
    "DIALECTS",
    "DRAFT",
    "Dialect",
    "Kind",
    "Piece",
    "draft_pieces",
    "draft_shapes",
    "expected_shapes",
    "leaf_shapes",
    "parameter_count",
    "tensor_pieces",
]

Dialect = Literal["official", "modules", "saved"]

DIALECTS: Final[tuple[Dialect, ...]] = ("official", "modules", "saved")

Kind = Literal["linear", "expert", "plain", "norm", "f32", "ids"]
"""How a tensor is kept. The first four have the model's dtype; releases store ``linear`` as FP8 and ``expert`` as FP4,
both with scales, ``plain`` and ``norm`` as BF16. ``f32`` always stays F32, and ``ids`` is I64."""

DRAFT: Final = "mtp.0."
"""The prefix of the draft block, which a release has for speculative decoding."""

_OVERLAPPING_RATIO: Final = 4
"""The ratio whose layers have an indexer and compressors with two halves (``k`` = 2 in the axes below)."""

_Where = Literal["model", "all", "compressed", "indexed", "scored", "hashed"]

_LEAVES: Final[Mapping[str, tuple[str, Kind, _Where]]] = {
    "embed": ("V H", "plain", "model"),
    "hc_head.fn": ("M M*H", "f32", "model"),
    "hc_head.base": ("M", "f32", "model"),
    "hc_head.scale": ("1", "f32", "model"),
    "norm": ("H", "norm", "model"),
    "head": ("V H", "plain", "model"),
    "attn_norm": ("H", "norm", "all"),
    "ffn_norm": ("H", "norm", "all"),
    "hc_attn.fn": ("(2+M)*M M*H", "f32", "all"),
    "hc_attn.base": ("(2+M)*M", "f32", "all"),
    "hc_attn.scale": ("3", "f32", "all"),
    "hc_ffn.fn": ("(2+M)*M M*H", "f32", "all"),
    "hc_ffn.base": ("(2+M)*M", "f32", "all"),
    "hc_ffn.scale": ("3", "f32", "all"),
    "attn.wq_a": ("Q H", "linear", "all"),
    "attn.q_norm": ("Q", "norm", "all"),
    "attn.wq_b": ("N*D Q", "linear", "all"),
    "attn.wkv": ("D H", "linear", "all"),
    "attn.kv_norm": ("D", "norm", "all"),
    "attn.attn_sink": ("N", "f32", "all"),
    "attn.wo_a": ("G*U N*D/G", "linear", "all"),
    "attn.wo_b": ("H G*U", "linear", "all"),
    "attn.compressor.wkv": ("k*D H", "plain", "compressed"),
    "attn.compressor.wgate": ("k*D H", "plain", "compressed"),
    "attn.compressor.ape": ("ratio k*D", "f32", "compressed"),
    "attn.compressor.norm": ("D", "norm", "compressed"),
    "attn.indexer.wq_b": ("I*J Q", "linear", "indexed"),
    "attn.indexer.weights_proj": ("I H", "plain", "indexed"),
    "attn.indexer.compressor.wkv": ("k*J H", "plain", "indexed"),
    "attn.indexer.compressor.wgate": ("k*J H", "plain", "indexed"),
    "attn.indexer.compressor.ape": ("ratio k*J", "f32", "indexed"),
    "attn.indexer.compressor.norm": ("J", "norm", "indexed"),
    "ffn.gate": ("E H", "plain", "all"),
    "ffn.bias": ("E", "f32", "scored"),
    "ffn.tid2eid": ("V K", "ids", "hashed"),
    "ffn.w13": ("E 2*F H", "expert", "all"),
    "ffn.w2": ("E H F", "expert", "all"),
    "ffn.shared_w13": ("2*F H", "linear", "all"),
    "ffn.shared_w2": ("H F", "linear", "all"),
}
"""Every tensor of ``Params``: its axes, its kind, and which layers have it."""

_OFFICIAL: Final[Mapping[str, tuple[str, ...]]] = {
    "hc_head.fn": ("hc_head_fn",),
    "hc_head.base": ("hc_head_base",),
    "hc_head.scale": ("hc_head_scale",),
    "hc_attn.fn": ("hc_attn_fn",),
    "hc_attn.base": ("hc_attn_base",),
    "hc_attn.scale": ("hc_attn_scale",),
    "hc_ffn.fn": ("hc_ffn_fn",),
    "hc_ffn.base": ("hc_ffn_base",),
    "hc_ffn.scale": ("hc_ffn_scale",),
    "attn.attn_sink": ("attn.attn_sink",),
    "attn.compressor.ape": ("attn.compressor.ape",),
    "attn.indexer.compressor.ape": ("attn.indexer.compressor.ape",),
    "ffn.bias": ("ffn.gate.bias",),
    "ffn.tid2eid": ("ffn.gate.tid2eid",),
    "ffn.w13": ("ffn.experts.{e}.w1.weight", "ffn.experts.{e}.w3.weight"),
    "ffn.w2": ("ffn.experts.{e}.w2.weight",),
    "ffn.shared_w13": ("ffn.shared_experts.w1.weight", "ffn.shared_experts.w3.weight"),
    "ffn.shared_w2": ("ffn.shared_experts.w2.weight",),
}
"""Where the official name is not the leaf's path with ``.weight`` behind it."""

_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "embed": ("model.embed_tokens.weight",),
    "hc_head.fn": ("model.hc_head.hc_fn",),
    "hc_head.base": ("model.hc_head.hc_base",),
    "hc_head.scale": ("model.hc_head.hc_scale",),
    "norm": ("model.norm.weight",),
    "head": ("lm_head.weight",),
    "attn_norm": ("input_layernorm.weight",),
    "ffn_norm": ("post_attention_layernorm.weight",),
    "hc_attn.fn": ("attn_hc.fn",),
    "hc_attn.base": ("attn_hc.base",),
    "hc_attn.scale": ("attn_hc.scale",),
    "hc_ffn.fn": ("ffn_hc.fn",),
    "hc_ffn.base": ("ffn_hc.base",),
    "hc_ffn.scale": ("ffn_hc.scale",),
    "attn.wq_a": ("self_attn.q_a_proj.weight",),
    "attn.q_norm": ("self_attn.q_a_norm.weight",),
    "attn.wq_b": ("self_attn.q_b_proj.weight",),
    "attn.wkv": ("self_attn.kv_proj.weight",),
    "attn.kv_norm": ("self_attn.kv_norm.weight",),
    "attn.attn_sink": ("self_attn.sinks",),
    "attn.wo_a": ("self_attn.o_a_proj.weight",),
    "attn.wo_b": ("self_attn.o_b_proj.weight",),
    "attn.compressor.wkv": ("self_attn.compressor.kv_proj.weight",),
    "attn.compressor.wgate": ("self_attn.compressor.gate_proj.weight",),
    "attn.compressor.ape": ("self_attn.compressor.position_bias",),
    "attn.compressor.norm": ("self_attn.compressor.kv_norm.weight",),
    "attn.indexer.wq_b": ("self_attn.compressor.indexer.q_b_proj.weight",),
    "attn.indexer.weights_proj": ("self_attn.compressor.indexer.scorer.weights_proj.weight",),
    "attn.indexer.compressor.wkv": ("self_attn.compressor.indexer.kv_proj.weight",),
    "attn.indexer.compressor.wgate": ("self_attn.compressor.indexer.gate_proj.weight",),
    "attn.indexer.compressor.ape": ("self_attn.compressor.indexer.position_bias",),
    "attn.indexer.compressor.norm": ("self_attn.compressor.indexer.kv_norm.weight",),
    "ffn.gate": ("mlp.gate.weight",),
    "ffn.bias": ("mlp.gate.e_score_correction_bias",),
    "ffn.tid2eid": ("mlp.gate.tid2eid",),
    "ffn.w13": ("mlp.experts.gate_up_proj",),
    "ffn.w2": ("mlp.experts.down_proj",),
    "ffn.shared_w13": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "ffn.shared_w2": ("mlp.shared_experts.down_proj.weight",),
}

_SAVED: Final[Mapping[str, tuple[str, ...]]] = {
    **_OFFICIAL,
    **{leaf: _MODULES[leaf] for leaf in ("embed", "hc_head.fn", "hc_head.base", "hc_head.scale", "norm")},
    "attn.kv_norm": ("attn.norm.weight",),
}

_NAMES: Final[Mapping[Dialect, tuple[str, Mapping[str, tuple[str, ...]]]]] = {
    "official": ("layers", _OFFICIAL),
    "modules": ("model.layers", _MODULES),
    "saved": ("model.layers", _SAVED),
}


@attrs.frozen
class Piece:
    """One tensor of a checkpoint, and the block of a ``Params`` leaf that it fills.

    Attributes:
        name: in the dialect asked for.
        shape: of the tensor, and of the block.
        kind: how it is kept.
        leaf: path of the field, such as ``layers.3.attn.wq_a``.
        block: index of the leaf; empty for the whole leaf.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    leaf: str
    block: tuple[int | slice, ...]


def leaf_shapes(config: Config) -> dict[str, tuple[tuple[int, ...], Kind]]:
    """List the tensors of ``Params``.

    Args:
        config: the model's numbers.
    Returns:
        Shape and kind by path (``layers.3.attn.wq_a``); what belongs to no layer comes first.
    """
    return {_at("layers", layer) + leaf: (shape, kind) for layer, leaf, shape, kind in _leaves(config)}


def tensor_pieces(config: Config, dialect: Dialect = "official") -> Iterator[Piece]:
    """List the tensors of a checkpoint in one dialect; together they fill every leaf exactly once."""
    prefix, table = _NAMES[dialect]
    for layer, leaf, shape, kind in _leaves(config):
        path = _at("layers", layer) + leaf
        yield from _named_pieces(_at(prefix, layer), table.get(leaf, (f"{leaf}.weight",)), shape, kind, path)


def draft_shapes(config: Config) -> dict[str, tuple[tuple[int, ...], Kind]]:
    """List the tensors of the draft block: shape and kind by path in ``DraftParams``."""
    hidden = config.hidden_size
    own: dict[str, tuple[tuple[int, ...], Kind]] = {
        **{name: ((hidden, hidden), "linear") for name in ("e_proj", "h_proj")},
        **{name: ((hidden,), "norm") for name in ("enorm", "hnorm")},
    }
    # It has the tensors of a window-only layer with selection bias, and a head's without the vocabulary.
    block = attrs.evolve(config, num_hidden_layers=1, compress_ratios=(0,), num_hash_layers=0)
    for layer, leaf, shape, kind in _leaves(block):
        if layer is not None:
            own[f"block.{leaf}"] = (shape, kind)
        elif leaf not in ("embed", "head"):
            own[leaf] = (shape, kind)
    return own


def draft_pieces(config: Config) -> Iterator[Piece]:
    """List the tensors of the draft block under their official names, the only ones that it has."""
    for path, (shape, kind) in draft_shapes(config).items():
        leaf = path.removeprefix("block.")
        yield from _named_pieces(DRAFT, _OFFICIAL.get(leaf, (f"{leaf}.weight",)), shape, kind, path)


def expected_shapes(config: Config) -> dict[str, tuple[tuple[int, ...], Kind]]:
    """List the tensors of an unquantised checkpoint under their official names.

    Args:
        config: the model's numbers.
    Returns:
        Shape and kind by name.
    """
    return {piece.name: (piece.shape, piece.kind) for piece in tensor_pieces(config)}


def parameter_count(config: Config) -> int:
    """Count the parameters of the model: every tensor but the expert tables of the hash layers."""
    return sum(prod(shape) for shape, kind in leaf_shapes(config).values() if kind != "ids")


def _named_pieces(prefix: str, names: Sequence[str], shape: tuple[int, ...], kind: Kind, path: str) -> Iterator[Piece]:
    if "{e}" not in names[0]:
        yield from _split_rows([prefix + name for name in names], shape, kind, path, ())
        return
    for expert in range(shape[0]):
        yield from _split_rows([prefix + name.format(e=expert) for name in names], shape[1:], kind, path, (expert,))


def _at(prefix: str, layer: int | None) -> str:
    return "" if layer is None else f"{prefix}.{layer}."


def _split_rows(
    names: Sequence[str], shape: tuple[int, ...], kind: Kind, path: str, at: tuple[int, ...]
) -> Iterator[Piece]:
    if len(names) == 1:
        yield Piece(names[0], shape, kind, path, at)
        return
    rows = shape[0] // len(names)
    for place, name in enumerate(names):
        yield Piece(name, (rows, *shape[1:]), kind, path, (*at, slice(place * rows, (place + 1) * rows)))


def _leaves(config: Config) -> Iterator[tuple[int | None, str, tuple[int, ...], Kind]]:
    """Yield (layer, leaf, shape, kind) of every tensor; the layer is None for what belongs to the whole model."""
    for layer in (None, *range(config.num_hidden_layers)):
        sizes, parts = _axis_sizes(config, layer), _parts_of(config, layer)
        for leaf, (axes, kind, where) in _LEAVES.items():
            if where in parts:
                yield layer, leaf, tuple(sizes[axis] for axis in axes.split()), kind


def _parts_of(config: Config, layer: int | None) -> set[_Where]:
    if layer is None:
        return {"model"}
    ratio = config.layer_ratio(layer)
    parts: set[_Where] = {"all", "hashed" if config.is_hash(layer) else "scored"}
    if ratio:
        parts.add("compressed")
    if ratio == _OVERLAPPING_RATIO:
        parts.add("indexed")
    return parts


def _axis_sizes(config: Config, layer: int | None) -> dict[str, int]:
    """Give the length of every axis that a table row names."""
    ratio = 0 if layer is None else config.layer_ratio(layer)
    halves = 2 if ratio == _OVERLAPPING_RATIO else 1
    streams, heads, width = config.hc_mult, config.num_attention_heads, config.head_dim
    return {
        "1": 1,
        "3": 3,  # one scale each for the pre, post and comb rows of a mix
        "ratio": ratio,
        "V": config.vocab_size,
        "H": config.hidden_size,
        "M": streams,
        "M*H": streams * config.hidden_size,
        "(2+M)*M": (2 + streams) * streams,
        "Q": config.q_lora_rank,
        "N": heads,
        "D": width,
        "N*D": heads * width,
        "N*D/G": heads * width // config.o_groups,
        "G*U": config.o_groups * config.o_lora_rank,
        "k*D": halves * width,
        "I": config.index_n_heads,
        "J": config.index_head_dim,
        "I*J": config.index_n_heads * config.index_head_dim,
        "k*J": halves * config.index_head_dim,
        "E": config.n_routed_experts,
        "K": config.num_experts_per_tok,
        "F": config.moe_intermediate_size,
        "2*F": 2 * config.moe_intermediate_size,
    }
