"""A short name for a model's weights, so that a saved state finds the model that it was made with.

Source: none; a content hash.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final

import torch
from torch import Tensor

from ..state.config_reading import config_to_dict
from .leaves import leaves_from_params
from .model import Model

__all__ = ["fingerprint"]

SAMPLE: Final = 1 << 15
"""Elements read from the beginning, the middle and the end of a weight that is larger than three such pieces."""


def fingerprint(model: Model) -> str:
    """Summarise a model's configuration and weights.

    Of a large weight three pieces are read, so that the cost does not grow with the model: retraining, another
    revision or another dtype change the fingerprint, an edit of a few numbers elsewhere may not.

    Args:
        model: the model, whatever its numerics; Ascend kernels keep some weights in another form and have another
            fingerprint.
    Returns:
        64 hexadecimal digits.
    """
    found = hashlib.sha256(json.dumps(config_to_dict(model.config), sort_keys=True).encode())
    for path, leaf in leaves_from_params(model.params).items():
        found.update(f"{path} {leaf.dtype} {tuple(leaf.shape)}".encode())
        for piece in _pieces(_in_memory_order(leaf.detach())):
            found.update(piece.cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _in_memory_order(leaf: Tensor) -> Tensor:
    """Flatten without a copy what a kernel wants stored with its last two axes exchanged."""
    return leaf.flatten() if leaf.is_contiguous() else leaf.mT.flatten()


def _pieces(flat: Tensor) -> tuple[Tensor, ...]:
    n = flat.numel()
    if n <= 3 * SAMPLE:
        return (flat,)
    middle = (n - SAMPLE) // 2
    return flat[:SAMPLE], flat[middle : middle + SAMPLE], flat[-SAMPLE:]
