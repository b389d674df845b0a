"""The draft block of a release as data: one more layer, which predicts the token after next.

Nothing runs it yet; it is read so that tools can show, convert and keep it. Its embedding and head are the model's.

Source: DeepSeek-V4 release, ``inference/model.py``, ``MTPBlock``; model sheet 2.13, 4.1.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ..state.config_reading import config_from_dict
from .filling import read_weights
from .header_checks import match_draft
from .layout import draft_shapes
from .leaves import draft_from_leaves
from .params import DraftParams
from .shards import CONFIG_FILE, Faults, read_headers, read_json

__all__ = ["read_draft"]


def read_draft(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, stored: bool | None = None
) -> DraftParams:
    """Read the draft block ``mtp.0`` of a checkpoint.

    Args:
        folder: of the checkpoint.
        dtype: as in ``read_checkpoint``.
        stored: as in ``read_checkpoint``.
    Returns:
        Its weights.
    Raises:
        CheckpointError: there is none, or it is not whole.
        ConfigError: the configuration is not of a model that purestep can run.
    """
    where = Path(folder)
    config = config_from_dict(read_json(where / CONFIG_FILE))
    faults, shards = Faults(where), read_headers(where)
    found = match_draft(config, shards, faults)
    faults.raise_if_any()
    kept = getattr(torch, config.torch_dtype) if dtype is None else dtype
    keep = dtype is None if stored is None else stored
    return draft_from_leaves(read_weights(shards, found, draft_shapes(config), kept, stored=keep, progress=None))
