"""In what forms a checkpoint keeps its weights: which tensors stand for one weight, and what ``config.json`` says.

A weight is one tensor of floats, or two tensors: codes under the weight's name and scales under a name derived from it.
Releases keep matrices of attention and of the shared expert in FP8, the routed experts in FP4 (-Base: FP8 with F32
scales), and everything else in BF16, F32 and I64.

Source: DeepSeek-V4 release, ``model.safetensors.index.json`` and ``config.json``; spellings of scales as in
transformers 5.24 (``integrations/finegrained_fp8.py``), sglang and vllm-ascend; model sheet 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any, Final, Literal

import attrs
import torch

from ..ops.formats import BLOCK, GROUP
from ..state.errors import ConfigError
from .layout import Kind, Piece

__all__ = [
    "CODES",
    "FORMS",
    "SCALES",
    "TYPES",
    "Cell",
    "Form",
    "Storage",
    "cells_of",
    "code_shape",
    "declared_forms",
    "quantization_header",
    "scale_names",
    "scale_shape",
]

Form = Literal["wide", "fp8", "fp4"]
"""How one weight is kept: as floats, as FP8 codes with scales, or as FP4 codes with scales."""

TYPES: Final[Mapping[str, torch.dtype]] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F4": torch.float4_e2m1fn_x2,
}
"""The types of tensors that a checkpoint may hold, as safetensors spells them."""

CODES: Final[Mapping[Form, tuple[str, ...]]] = {
    "wide": ("BF16", "F16", "F32"),
    "fp8": ("F8_E4M3",),
    "fp4": ("I8", "U8", "F4"),
}
"""Types of a weight in each form; the release's own is first. Packed FP4 has no type of its own in most files."""

SCALES: Final[Mapping[Form, tuple[str, ...]]] = {"wide": (), "fp8": ("F8_E8M0", "F32", "U8"), "fp4": ("F8_E8M0", "U8")}
"""Types of the scales of each form; U8 is e8m0 written as bytes."""

_ENDINGS: Final = (".scale", ".weight_scale_inv", ".weight_scale")


@attrs.frozen(kw_only=True)
class Storage:
    """The forms of a whole checkpoint.

    Attributes:
        linear: of the matrices that releases keep in FP8.
        expert: of the routed experts.
        wide: type of what is kept as floats, but for what is always F32.
        scales: type of FP8 scales; those of FP4 are e8m0.
    """

    linear: Form = "wide"
    expert: Form = "wide"
    wide: str = "BF16"
    scales: str = "F8_E8M0"

    def form(self, kind: Kind) -> Form:
        """Tell the form of a tensor of some kind."""
        return self.linear if kind == "linear" else self.expert if kind == "expert" else "wide"


FORMS: Final[Mapping[str, Storage]] = {
    "fp4": Storage(linear="fp8", expert="fp4"),
    "fp8": Storage(linear="fp8", expert="fp8", scales="F32"),
    "bf16": Storage(),
    "f32": Storage(wide="F32"),
}
"""Storage by name: that of the Flash and Pro releases, that of -Base, and two without codes."""


@attrs.frozen
class Cell:
    """One tensor of a file.

    Attributes:
        name: in the file.
        type: as safetensors spells it.
        shape: in the file.
        piece: the weight that it belongs to.
        is_scale: whether it holds that weight's scales.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    piece: Piece
    is_scale: bool = False


def cells_of(piece: Piece, storage: Storage) -> Iterator[Cell]:
    """List the tensors that stand for one weight, the codes first.

    Args:
        piece: the weight.
        storage: forms of the checkpoint.
    Returns:
        One or two tensors; the scales are named as the dialect of ``piece`` has it.
    """
    form = storage.form(piece.kind)
    if form == "wide":
        kind = {"f32": "F32", "ids": "I64"}.get(piece.kind, storage.wide)
        yield Cell(piece.name, kind, piece.shape, piece)
        return
    scales = storage.scales if form == "fp8" else "F8_E8M0"
    yield Cell(piece.name, CODES[form][0], code_shape(piece.shape, CODES[form][0]), piece)
    yield Cell(scale_names(piece.name)[0], scales, scale_shape(piece.shape, form), piece, is_scale=True)


def scale_names(name: str) -> tuple[str, ...]:
    """List the names that the scales of a weight may have; the first is the one that its dialect writes."""
    if not name.endswith(".weight"):
        return (f"{name}_scale_inv",)
    stem = name.removesuffix(".weight")
    names = tuple(stem + ending for ending in _ENDINGS)
    # Module names are transformers' own, and so is the spelling of their scales.
    return (names[1], names[0], names[2]) if ".self_attn." in name or ".mlp." in name else names


def code_shape(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """Compute the shape in a file of a weight's tensor of some type: bytes hold two FP4 codes each."""
    return (*shape[:-1], shape[-1] // 2) if kind in ("I8", "U8") else shape


def scale_shape(shape: tuple[int, ...], form: Form) -> tuple[int, ...]:
    """Compute the shape of the scales of a weight."""
    *lead, rows, columns = shape
    return (*lead, ceil(rows / BLOCK), ceil(columns / BLOCK)) if form == "fp8" else (*lead, rows, ceil(columns / GROUP))


def quantization_header(linear: Form, expert: Form, scales: str) -> dict[str, Any]:
    """Describe stored forms for a ``config.json`` the way the release does; empty where there are no codes."""
    if linear == "wide":
        return {} if expert == "wide" else {"expert_dtype": expert}
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
    }
    if scales == "F8_E8M0":
        quantization["scale_fmt"] = "ue8m0"
    return {"quantization_config": quantization, "expert_dtype": "bf16" if expert == "wide" else expert}


def declared_forms(raw: Any) -> dict[Kind, Form]:
    """Read what a ``config.json`` says about the forms of its weights.

    Args:
        raw: the parsed file.
    Returns:
        Form by kind, as far as the file says anything.
    Raises:
        ConfigError: a quantisation other than the release's.
    """
    fields = raw if isinstance(raw, Mapping) else {}
    quantization = fields.get("quantization_config")
    found: dict[Kind, Form] = {}
    if quantization is not None:
        _check_quantization(quantization)
        found["linear"] = "fp8"
    expert = fields.get("expert_dtype")
    if expert is not None:
        names: dict[Any, Form] = {"fp4": "fp4", "fp8": "fp8", "bf16": "wide", "bfloat16": "wide"}
        if not isinstance(expert, str) or expert not in names:
            _refuse("expert_dtype", "fp4, fp8 or bf16", expert)
        found["expert"] = names[expert]
    return found


_QUANTIZATION: Final[Mapping[str, tuple[Any, ...]]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "weight_block_size": ([BLOCK, BLOCK],),
    "activation_scheme": ("dynamic", None),
    "scale_fmt": ("ue8m0", "float", None),
}
"""What a ``quantization_config`` may say; None: nothing."""


def _check_quantization(quantization: Any) -> None:
    if not isinstance(quantization, Mapping):
        _refuse("quantization_config", "an object", quantization)
    for name, allowed in _QUANTIZATION.items():
        got = quantization.get(name)
        if got not in allowed:
            _refuse(f"quantization_config.{name}", " or ".join(str(one) for one in allowed if one is not None), got)


def _refuse(field: str, expected: str, got: Any) -> None:
    raise ConfigError(
        f"config: {field}: expected {expected}, got {str(got)[:80]}; purestep reads the forms of DeepSeek-V4's "
        "releases: correct config.json or convert the weights",
        field=field,
        expected=expected,
        got=got,
    )
