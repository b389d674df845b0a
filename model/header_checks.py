"""Comparing the headers of a checkpoint with what its configuration asks for.

Source: DeepSeek-V4 release, ``model.safetensors.index.json``; layouts of quantised storage as in transformers 5.24
(``integrations/finegrained_fp8.py``), sglang and vllm-ascend.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import attrs
from torch import Tensor

from ..state.config import Config
from .layout import DIALECTS, DRAFT, Dialect, Kind, Piece, draft_pieces, tensor_pieces
from .shards import Faults, Header, Shards
from .storage import CODES, SCALES, Form, Storage, code_shape, scale_names, scale_shape

__all__ = ["Found", "Match", "check_expert_tables", "find_dialect", "match_draft", "match_tensors", "storage_of"]

_IDS: Final = ("I32", "I64")

_DRAFT: Final = re.compile(r"(model\.)?mtp\.(?P<block>\d+)\.")
"""The draft block for speculative decoding, which is not part of the main model."""

_SCALES: Final[Mapping[str, str]] = {
    ".weight_scale_inv": "weight_scale_inv, as transformers and sglang write",
    "_scale_inv": "stacked experts with _scale_inv, as transformers writes",
    ".weight_scale": "weight_scale, as vllm-ascend and compressed-tensors write",
    ".input_scale": "input_scale, for static activation scales, which the model does not use",
    ".activation_scale": "activation_scale, for static activation scales, which the model does not use",
    ".scale": "scale, the release's own layout",
}
"""Endings of the names of scales, longest first, with the layout that they belong to."""

_PROBED: Final = 400
"""Names of a dialect that are looked up to tell which one a checkpoint has; the first layers have them all."""


@attrs.frozen
class Found:
    """One weight of a checkpoint, and how it lies there.

    Attributes:
        piece: the weight.
        form: as floats, or as codes with scales.
        scale: the name of its scales; None for floats.
    """

    piece: Piece
    form: Form
    scale: str | None = None


@attrs.frozen
class Match:
    """What a checkpoint holds of a model.

    Attributes:
        weights: as far as they are there and fit.
        dialect: of the names.
        extra: names that belong to no weight of the main model; those of the draft block are among them.
    """

    weights: tuple[Found, ...]
    dialect: Dialect
    extra: tuple[str, ...]


def find_dialect(config: Config, names: Collection[str]) -> Dialect:
    """Tell which dialect fits the names of a checkpoint best."""

    def hits(dialect: Dialect) -> int:
        pieces = zip(range(_PROBED), tensor_pieces(config, dialect), strict=False)
        return sum(piece.name in names for _, piece in pieces)

    return max(DIALECTS, key=hits)


def match_tensors(
    config: Config,
    shards: Shards,
    faults: Faults,
    *,
    declared: Mapping[Kind, Form] | None = None,
    layers: Collection[int] | None = None,
) -> Match:
    """Find the tensors of the model among those of the checkpoint, and note what does not fit.

    Args:
        config: the model's numbers.
        shards: the headers.
        faults: what is wrong is noted here.
        declared: forms that ``config.json`` names.
        layers: that are wanted; what the others lack is no fault. All by default.
    Returns:
        The weights of the wanted layers, in the naming dialect that fits the checkpoint best.
    """
    dialect = find_dialect(config, shards.headers.keys() | shards.unread.keys())
    every = list(tensor_pieces(config, dialect))
    unwanted = set() if layers is None else {f"layers.{i}." for i in range(config.num_hidden_layers)}
    unwanted -= {f"layers.{i}." for i in layers or ()}
    others = [piece for piece in every if _layer_of(piece) in unwanted]
    wanted = [piece for piece in every if _layer_of(piece) not in unwanted] if others else every
    _note_absent(shards, None if layers is None else wanted, faults)
    weights = _match_pieces(wanted, shards, faults)
    _check_leaves(weights, shards.headers, faults)
    _check_declared(weights, declared or {}, faults)
    own = {piece.name for piece in every} | {found.scale for found in weights}
    own |= {name for piece in others for name in scale_names(piece.name)}
    extra = tuple(name for name in shards.headers if name not in own)
    _note_extra(extra, shards.headers, faults)
    return Match(tuple(weights), dialect, extra)


def match_draft(config: Config, shards: Shards, faults: Faults) -> list[Found]:
    """Find the tensors of the draft block, which have official names only, and note what does not fit."""
    pieces = list(draft_pieces(config))
    _note_absent(shards, pieces, faults)
    weights = _match_pieces(pieces, shards, faults)
    _check_leaves(weights, shards.headers, faults)
    own = {piece.name for piece in pieces} | {found.scale for found in weights}
    for name in shards.headers:
        # Some exports repeat the embedding and the head, which the block shares with the model.
        is_copy = "emb" in name or name.endswith("head.weight")
        if name.startswith(DRAFT) and name not in own and not is_copy:
            faults.add("left-over tensors", name)
    return weights


def check_expert_tables(config: Config, weights: Iterable[Found], shards: Shards, faults: Faults) -> None:
    """Note every expert table whose rows are not distinct ids of experts; the only values that are looked at."""
    n_experts = config.n_routed_experts
    tables = [found.piece.name for found in weights if found.piece.kind == "ids"]
    for name, (table,) in zip(tables, shards.read((name,) for name in tables), strict=True):
        ordered: Tensor = table.sort(dim=1).values
        is_outside = (ordered[:, 0] < 0) | (ordered[:, -1] >= n_experts)
        is_repeated = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
        rows = (is_outside | is_repeated).nonzero().flatten().tolist()
        if rows:
            got = f"{len(rows)} rows, first row {rows[0]}: {table[rows[0]].tolist()}"
            faults.add(f"tables whose rows are not distinct expert ids 0..{n_experts - 1}", f"{name} ({got})")


def storage_of(weights: Iterable[Found], shards: Shards) -> Storage | None:
    """Tell the forms of a checkpoint, or None where weights of one kind have several."""
    forms: dict[str, set[Form]] = {"linear": set(), "expert": set()}
    scales, wide = set(), set()
    for found in weights:
        if found.piece.kind in forms:
            forms[found.piece.kind].add(found.form)
        if found.form == "fp8" and found.scale:
            scales.add("F32" if shards.headers[found.scale].dtype == "F32" else "F8_E8M0")
        if found.form == "wide" and found.piece.kind not in ("f32", "ids"):
            wide.add(shards.headers[found.piece.name].dtype)
    if len(forms["linear"]) != 1 or len(forms["expert"]) != 1 or len(scales) > 1:
        return None
    return Storage(
        linear=forms["linear"].pop(),
        expert=forms["expert"].pop(),
        wide="BF16" if wide <= {"BF16"} else "F32" if wide != {"F16"} else "F16",
        scales=scales.pop() if scales else "F8_E8M0",
    )


def _layer_of(piece: Piece) -> str:
    first, _, rest = piece.leaf.partition(".")
    return f"layers.{rest.partition('.')[0]}." if first == "layers" else ""


def _note_absent(shards: Shards, wanted: Iterable[Piece] | None, faults: Faults) -> None:
    """Note files that could not be opened, and tensors that are not where the index says; of the wanted, if given."""
    names = None if wanted is None else {piece.name for piece in wanted}
    lost = {name: file for name, file in shards.unread.items() if names is None or name in names}
    for file, fault in shards.absent.items():
        # A file that no index names holds everything.
        if names is None or file in lost.values() or not shards.unread:
            faults.add(*fault)
    for name, file in lost.items():
        if file not in shards.absent:
            faults.add("tensors that the index places in a file that lacks them", f"{name} ({file})")


def _match_pieces(pieces: Iterable[Piece], shards: Shards, faults: Faults) -> list[Found]:
    headers, found = shards.headers, []
    for piece in pieces:
        header = headers.get(piece.name)
        if header is None:
            if piece.name not in shards.unread:
                faults.add("missing tensors", piece.name)
            continue
        form = _check_codes(piece, header, faults)
        scale = None
        if form in ("fp8", "fp4"):
            scale = _find_scale(piece, form, shards, faults)
        found.append(Found(piece, form or "wide", scale))
    return found


def _check_codes(piece: Piece, header: Header, faults: Faults) -> Form | None:
    """Tell the form of a weight from its type, and note a type or shape that it cannot have."""
    forms: dict[str, Form] = {kind: "wide" for kind in (_IDS if piece.kind == "ids" else CODES["wide"])}
    if piece.kind in ("linear", "expert"):
        forms |= {kind: "fp8" for kind in CODES["fp8"]}
    if piece.kind == "expert" and piece.shape[-1] % 2 == 0:
        forms |= {kind: "fp4" for kind in CODES["fp4"]}
    form = forms.get(header.dtype)
    if form is None:
        text = f"{piece.name} (expected {' or '.join(forms)}, got {header.dtype})"
        faults.add("tensors of a wrong type", text)
    shape = code_shape(piece.shape, header.dtype) if form == "fp4" else piece.shape
    if header.shape != shape:
        faults.add("tensors of a wrong shape", f"{piece.name} (expected {list(shape)}, got {list(header.shape)})")
    return form


def _find_scale(piece: Piece, form: Form, shards: Shards, faults: Faults) -> str | None:
    names = scale_names(piece.name)
    scale = next((name for name in names if name in shards.headers or name in shards.unread), None)
    if scale is None:
        wanted = f"{piece.name} (expected {names[0]} {list(scale_shape(piece.shape, form))})"
        faults.add(f"{form.upper()} weights without scales", wanted)
    elif scale in shards.headers:
        header, shape = shards.headers[scale], scale_shape(piece.shape, form)
        if header.dtype not in SCALES[form]:
            text = f"{scale} (expected {' or '.join(SCALES[form])}, got {header.dtype})"
            faults.add("scales of a wrong type", text)
        if header.shape != shape:
            text = f"{scale} (expected {list(shape)} for {form.upper()}, got {list(header.shape)})"
            faults.add("scales of a wrong shape", text)
    return scale


def _check_leaves(weights: Iterable[Found], headers: Mapping[str, Header], faults: Faults) -> None:
    """Note weights that one operator takes together, but that are not stored alike."""
    first: dict[str, tuple[Form, str | None]] = {}
    for found in weights:
        scale = headers.get(found.scale or "")
        how = found.form, "F32" if scale and scale.dtype == "F32" else None
        if first.setdefault(found.piece.leaf, how) != how:
            faults.add("weights that are stored otherwise than others of the same operator", found.piece.name)


def _check_declared(weights: Iterable[Found], declared: Mapping[Kind, Form], faults: Faults) -> None:
    """Note weights that are not stored as ``config.json`` says."""
    for kind, form in declared.items():
        own = [found for found in weights if found.piece.kind == kind]
        # Some matrices may have been left as floats; all of them, and the label is wrong.
        wrong = [found for found in own if found.form != form]
        if wrong and (kind == "expert" or len(wrong) == len(own)):
            said = form.upper() if form != "wide" else "floats"
            for found in wrong:
                got = found.form.upper() if found.form != "wide" else "floats"
                faults.add(f"tensors that config.json says are {said}", f"{found.piece.name} (got {got})")


def _note_extra(extra: Iterable[str], headers: Mapping[str, Header], faults: Faults) -> None:
    for name in extra:
        draft = _DRAFT.match(name)
        if draft is None:
            layout = _scale_layout(name, headers)
            faults.add("left-over tensors" if layout is None else f"left-over scales ({layout})", name)
        elif draft["block"] != "0":
            faults.add("tensors of another draft model (a DSpark release, which is not supported)", name)


def _scale_layout(name: str, headers: Mapping[str, Header]) -> str | None:
    for ending, layout in _SCALES.items():
        if name.endswith(ending):
            # Weights of mHC are called scale too; the scale of a quantised weight has the weight beside it.
            is_scale = ending != ".scale" or f"{name.removesuffix(ending)}.weight" in headers
            return layout if is_scale else None
    return None
