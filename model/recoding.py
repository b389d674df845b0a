"""Bringing one weight from the form that it is stored in to another.

From FP8 and FP4 to floats and from FP4 to FP8 nothing is lost, as long as the range of the target suffices (``formats``
says where it ends); the other ways round to the nearest number that the target has.

Source: DeepSeek-V4 release, ``inference/convert.py`` (FP4 to FP8); model sheet 4.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.formats import E8M0, Fp4Weight, Fp8Weight, StoredWeight, expand, fp4_weight, fp8_weight, is_stored, refit_fp8
from ..state.errors import CheckpointError
from .filling import float_type
from .layout import Kind
from .storage import TYPES, Storage

__all__ = ["file_tensors", "recode"]


def recode(weight: Tensor | StoredWeight, kind: Kind, storage: Storage, name: str) -> Tensor | StoredWeight:
    """Bring a weight to the form that a storage has for its kind.

    Args:
        weight: of one tensor of a release.
        kind: of the weight.
        storage: the target.
        name: of the weight, for messages.
    Returns:
        The weight; the same object if it has that form already.
    Raises:
        CheckpointError: numbers that are not finite cannot be quantised.
    """
    form = storage.form(kind)
    if form == "wide":
        dtype = float_type(kind, TYPES[storage.wide])
        return weight.to(dtype) if isinstance(weight, Tensor) else expand(weight, dtype)
    scales = TYPES[storage.scales]
    if isinstance(weight, Fp8Weight) and form == "fp8":
        return _rescaled(weight, scales)
    if isinstance(weight, Fp4Weight):
        return weight if form == "fp4" else refit_fp8(weight, scale_dtype=scales)
    wide = weight if isinstance(weight, Tensor) else expand(weight, torch.float32)
    if not bool(wide.isfinite().all()):
        raise CheckpointError(
            f"{name}: expected finite numbers to quantise, got NaN or infinity; keep this checkpoint as floats",
            field=name,
            expected="finite numbers",
            got="NaN or infinity",
        )
    return fp4_weight(wide) if form == "fp4" else fp8_weight(wide, scale_dtype=scales)


def file_tensors(weight: Tensor | StoredWeight) -> tuple[Tensor, ...]:
    """Turn a weight of one tensor of a release into what files hold: floats, or codes and scales."""
    if not is_stored(weight):
        assert isinstance(weight, Tensor), "a weight is a tensor or stored"
        return (weight,)
    if isinstance(weight, Fp8Weight):
        return weight.codes, weight.scales.squeeze(-3)
    return weight.codes.view(torch.int8), weight.scales


def _rescaled(weight: Fp8Weight, scales: torch.dtype) -> Fp8Weight:
    """Change the type of the scales; where e8m0 does not hold them, the numbers are quantised anew."""
    if weight.scales.dtype is scales:
        return weight
    found = weight.scales.to(scales)
    if scales is E8M0 and not torch.equal(found.float(), weight.scales):
        return fp8_weight(expand(weight, torch.float32))
    return Fp8Weight(weight.codes, found)
