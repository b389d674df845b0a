"""A model that has some of another one's layers.

Source: none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import attrs

from ..state.config import Config
from ..state.errors import ConfigError

__all__ = ["checked_layers", "moved_path", "slice_config"]

_LAYER_PATH: Final = re.compile(r"layers\.(\d+)\.(.*)")


def checked_layers(config: Config, layers: Iterable[int]) -> tuple[int, ...]:
    """Return the layers asked for, if a model can be made of them.

    Raises:
        ConfigError: they are not some of the model's layers in ascending order.
    """
    chosen = tuple(layers)
    last = config.num_hidden_layers - 1
    is_right = bool(chosen) and all(type(i) is int and 0 <= i <= last for i in chosen)
    if not is_right or any(a >= b for a, b in pairwise(chosen)):
        raise ConfigError(
            f"layers: expected some of the layers 0..{last} in ascending order, got {chosen}",
            field="layers",
            expected=f"ascending, 0..{last}",
            got=chosen,
        )
    return chosen


def slice_config(config: Config, layers: tuple[int, ...]) -> Config:
    """Describe the model that has only ``layers`` of another one; each stays of its kind.

    Layers that route by token id come first in every model, so an ascending choice has them first too.
    """
    return attrs.evolve(
        config,
        num_hidden_layers=len(layers),
        compress_ratios=tuple(config.compress_ratios[i] for i in layers),
        num_hash_layers=sum(map(config.is_hash, layers)),
    )


def moved_path(path: str, layers: tuple[int, ...]) -> str | None:
    """Say where a weight of the whole model lies in the sliced one.

    Args:
        path: of the weight in ``Params``.
        layers: that the slice has.
    Returns:
        Its path there, or None if its layer is left out.
    """
    found = _LAYER_PATH.fullmatch(path)
    if found is None:
        return path
    layer = int(found[1])
    return f"layers.{layers.index(layer)}.{found[2]}" if layer in layers else None
