"""``Params`` as a flat mapping from paths to weights, and back.

A path is the way to a field, ``layers.3.attn.wq_a``; fields that a layer does not have (None) have no path. A weight
that is kept as a release stores it is one weight, or as tensors two: its codes and its scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..ops.formats import StoredWeight, expand, is_stored
from .params import (
    AttentionParams,
    CompressorParams,
    DraftParams,
    IndexerParams,
    LayerParams,
    MoEParams,
    Params,
    StreamParams,
)

__all__ = [
    "draft_from_leaves",
    "expanded",
    "has_stored",
    "leaves_from_params",
    "params_from_leaves",
    "weights_from_params",
]

_Tree = TypeVar("_Tree")

_CLASSES: Final[Mapping[str, type[Any]]] = {
    "hc_head": StreamParams,
    "hc_attn": StreamParams,
    "hc_ffn": StreamParams,
    "attn": AttentionParams,
    "compressor": CompressorParams,
    "indexer": IndexerParams,
    "ffn": MoEParams,
    "block": LayerParams,
}
"""The class of every field that is not a tensor; the layers are treated apart."""


def leaves_from_params(params: Params | DraftParams) -> dict[str, Tensor]:
    """List the tensors of ``params`` by path."""
    found, _ = pytree.tree_flatten_with_path(params)
    return {".".join(_word(key) for key in path): leaf for path, leaf in found if leaf is not None}


def weights_from_params(params: Params | DraftParams) -> dict[str, Tensor | StoredWeight]:
    """List the weights of ``params`` by path, stored ones whole."""
    found, _ = pytree.tree_flatten_with_path(params, is_leaf=is_stored)
    return {".".join(_word(key) for key in path): leaf for path, leaf in found if leaf is not None}


def has_stored(tree: Any) -> bool:
    """Tell whether any weight is kept as a release stores it."""
    return any(map(is_stored, pytree.tree_leaves(tree, is_leaf=is_stored)))


def expanded(tree: _Tree, dtype: torch.dtype) -> _Tree:
    """Replace every stored weight of a tree of weights by its numbers.

    Args:
        tree: ``Params``, or a part of them.
        dtype: of what was stored.
    Returns:
        The same tree; what was not stored is shared.
    """
    change: _Tree = pytree.tree_map(lambda w: expand(w, dtype) if is_stored(w) else w, tree, is_leaf=is_stored)
    return change


def params_from_leaves(leaves: Mapping[str, Tensor | StoredWeight]) -> Params:
    """Build ``Params`` from its weights by path; a path that is not there becomes None.

    Args:
        leaves: one weight for every path of ``layout.leaf_shapes``.
    Returns:
        The weights. They share storage with ``leaves``.
    """
    tree = _tree_of(leaves)
    layers = tree.pop("layers", {})
    in_order = sorted(layers.items(), key=lambda item: int(item[0]))
    built: Params = _build(Params, tree, layers=tuple(_build(LayerParams, node) for _, node in in_order))
    return built


def draft_from_leaves(leaves: Mapping[str, Tensor | StoredWeight]) -> DraftParams:
    """Build ``DraftParams`` from its weights by path, one for every path of ``layout.draft_shapes``."""
    built: DraftParams = _build(DraftParams, _tree_of(leaves))
    return built


def _tree_of(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def _build(cls: type[Any], tree: Mapping[str, Any], **given: Any) -> Any:
    fields = [field.name for field in attrs.fields(cls) if field.name not in given]
    values = {
        name: _build(_CLASSES[name], tree[name]) if isinstance(tree.get(name), dict) else tree.get(name)
        for name in fields
    }
    return cls(**values, **given)


def _word(key: Any) -> str:
    return str(key.idx) if isinstance(key, pytree.SequenceKey) else str(key.name)
