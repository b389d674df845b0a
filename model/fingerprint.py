"""A short name for a model's weights, so that a saved state finds the model that it was made with.

Source: none; a content hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from math import prod
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ..ops.collectives import all_reduce
from ..state.config_reading import config_to_dict
from .cuts import Cut, leaf_cuts
from .layout import leaf_shapes
from .leaves import leaves_from_params
from .model import Model
from .ranks import Ranks

__all__ = ["fingerprint"]

SAMPLE: Final = 1 << 15
"""Elements read from the beginning, the middle and the end of a weight that is larger than three such pieces."""

_INTEGERS: Final[Mapping[int, torch.dtype]] = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as a weight's numbers."""


def fingerprint(model: Model) -> str:
    """Summarise a model's configuration and weights.

    Of a large weight three pieces are read, so that the cost does not grow with the model: retraining, another
    revision or another dtype change the fingerprint, an edit of a few numbers elsewhere may not.

    Args:
        model: the model, whatever its numerics and layout; Ascend kernels keep some weights in another form and have
            another fingerprint. Over several ranks it is found once, at the load, by all of them together.
    Returns:
        64 hexadecimal digits.
    """
    if model.fingerprint is not None:
        return model.fingerprint
    found = hashlib.sha256(json.dumps(config_to_dict(model.config), sort_keys=True).encode())
    shapes = leaf_shapes(model.config)
    for path, leaf in leaves_from_params(model.params).items():
        if path.endswith(".place"):  # where experts lie says nothing about them
            continue
        cuts = leaf_cuts(model.config, model.ranks, path)
        shape = shapes[path][0] if cuts else tuple(leaf.shape)
        found.update(f"{path} {leaf.dtype} {shape}".encode())
        for start, stop in _pieces(prod(shape)):
            flat = _in_memory_order(leaf.detach())
            piece = _joined(leaf, shape, cuts, start, stop, model.ranks) if cuts else flat[start:stop]
            found.update(piece.cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _in_memory_order(leaf: Tensor) -> Tensor:
    """Flatten without a copy what a kernel wants stored with its last two axes exchanged."""
    return leaf.flatten() if leaf.is_contiguous() else leaf.mT.flatten()


def _pieces(n: int) -> tuple[tuple[int, int], ...]:
    if n <= 3 * SAMPLE:
        return ((0, n),)
    middle = (n - SAMPLE) // 2
    return (0, SAMPLE), (middle, middle + SAMPLE), (n - SAMPLE, n)


def _joined(leaf: Tensor, shape: tuple[int, ...], cuts: tuple[Cut, ...], start: int, stop: int, ranks: Ranks) -> Tensor:
    """Put a piece of a weight together from what the ranks hold of it, bit for bit."""
    at = np.unravel_index(np.arange(start, stop), shape)
    is_here, local = np.ones(stop - start, bool), list(at)
    for cut in cuts:
        local[cut.axis] = cut.local(at[cut.axis], shape[cut.axis])
        is_here &= local[cut.axis] >= 0
    index = np.ravel_multi_index([np.where(is_here, one, 0) for one in local], tuple(leaf.shape))
    bits = leaf.detach().contiguous().view(_INTEGERS[leaf.dtype.itemsize]).flatten()
    # The least integer stands for what others hold; where it is the content itself, it wins against nothing as well.
    least = torch.iinfo(torch.int64).min
    mine = torch.where(torch.from_numpy(is_here), bits.index_select(0, torch.from_numpy(index)).long(), least)
    return all_reduce(mine, ranks.world, "max").to(_INTEGERS[leaf.dtype.itemsize])
