"""Where the weights of a checkpoint that is to be written come from: a folder, or some of one.

A source gives weights one after the other, each as one tensor of a release (floats, or codes with scales), in the order
that they are asked for; nothing is held in between.

Source: none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from os import PathLike
from pathlib import Path
from typing import Protocol

import attrs
import torch
from torch import Tensor

from ..ops.formats import BLOCK, StoredWeight, expand
from ..state.config import Config
from ..state.config_reading import config_from_dict
from ..state.errors import ConfigError
from .filling import as_stored
from .header_checks import Found, match_draft, match_tensors, storage_of
from .layout import DRAFT, Piece
from .shards import CONFIG_FILE, Faults, Shards, read_headers, read_json
from .slicing import checked_layers, slice_config
from .storage import Storage, declared_forms

__all__ = ["FolderSource", "SlicedSource", "WeightSource", "folder_source", "sliced_source"]


class WeightSource(Protocol):
    """What gives the weights of one model."""

    @property
    def config(self) -> Config:
        """The model's numbers."""

    @property
    def has_draft(self) -> bool:
        """Whether the draft block is there too."""

    def weights(self, pieces: Sequence[Piece]) -> Iterator[Tensor | StoredWeight]:
        """Give the weights of some official tensors of the model, in this order."""

    def identity(self) -> str:
        """Name the weights, so that an interrupted writing goes on with the same ones only."""


@attrs.frozen(eq=False, kw_only=True)
class FolderSource:
    """A checkpoint in files.

    Attributes:
        config: the model's numbers.
        has_draft: whether the draft block is there too.
        shards: the headers.
        found: every weight by its place.
        storage: the forms that the files have, or None where they have several for one kind.
    """

    config: Config
    has_draft: bool
    shards: Shards
    found: Mapping[str, Found] = attrs.field(repr=False)
    storage: Storage | None

    def weights(self, pieces: Sequence[Piece]) -> Iterator[Tensor | StoredWeight]:
        """Give weights, mapped from the files; see ``WeightSource``."""
        places = [self._find(piece) for piece in pieces]
        names = [(found.piece.name, found.scale) if found.scale else (found.piece.name,) for found, _ in places]
        for (found, block), tensors in zip(places, self.shards.read(names), strict=True):
            yield _cut(found, block, tensors)

    def identity(self) -> str:
        """Name the weights by headers, sizes and times of the files."""
        digest = hashlib.sha256()
        for name, header in sorted(self.shards.headers.items()):
            digest.update(f"{name} {header}\n".encode())
        for file in sorted({header.file for header in self.shards.headers.values()}):
            status = (self.shards.folder / file).stat()
            digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def _find(self, piece: Piece) -> tuple[Found, tuple[int | slice, ...]]:
        """Find the tensor of the files that holds an official one, and where in it."""
        own = self.found.get(_place(piece))
        return (own, ()) if own is not None else (self.found[_place(attrs.evolve(piece, block=()))], piece.block)


@attrs.frozen(eq=False, kw_only=True)
class SlicedSource:
    """Some layers, experts and tokens of another source.

    Attributes:
        config: the numbers of what is left.
        source: the whole.
        layers: of the whole, that are kept.
    """

    config: Config
    source: WeightSource
    layers: tuple[int, ...]

    @property
    def has_draft(self) -> bool:
        """Whether the draft block is there too."""
        return self.source.has_draft

    def weights(self, pieces: Sequence[Piece]) -> Iterator[Tensor | StoredWeight]:
        """Give weights, cut to size; see ``WeightSource``."""
        originals = [self._original(piece) for piece in pieces]
        for piece, weight in zip(pieces, self.source.weights(originals), strict=True):
            if not isinstance(weight, Tensor):
                yield weight
            elif piece.kind == "ids":
                yield _renumbered(weight[: piece.shape[0]], self.config.n_routed_experts)
            else:
                yield weight[: piece.shape[0]]

    def identity(self) -> str:
        """Name the weights by the whole and what is kept of it."""
        return f"{self.source.identity()} {self.layers} {self.config.n_routed_experts} {self.config.vocab_size}"

    def _original(self, piece: Piece) -> Piece:
        prefix, _, rest = piece.leaf.partition(".")
        if prefix != "layers":
            return piece
        layer, _, leaf = rest.partition(".")
        return attrs.evolve(piece, leaf=f"layers.{self.layers[int(layer)]}.{leaf}")


def folder_source(folder: str | PathLike[str]) -> FolderSource:
    """Look at a checkpoint that is to be copied.

    Args:
        folder: of the checkpoint.
    Returns:
        Its weights, unread.
    Raises:
        CheckpointError: it cannot be loaded; as ``read_checkpoint``.
        ConfigError: it is not of a model that purestep can run.
    """
    where = Path(folder)
    raw = read_json(where / CONFIG_FILE)
    config = config_from_dict(raw)
    faults, shards = Faults(where), read_headers(where)
    match = match_tensors(config, shards, faults, declared=declared_forms(raw))
    has_draft = any(name.startswith(DRAFT) for name in match.extra)
    draft = match_draft(config, shards, faults) if has_draft else []
    faults.raise_if_any()
    found = {_place(one.piece): one for one in (*match.weights, *draft)}
    storage = storage_of((*match.weights, *draft), shards)
    return FolderSource(config=config, has_draft=has_draft, shards=shards, found=found, storage=storage)


def sliced_source(
    source: WeightSource, *, layers: Sequence[int] | None, experts: int | None, vocab: int | None
) -> SlicedSource:
    """Keep some layers, the first experts and the first tokens of a model.

    Tables that route by token id get other experts in place of those that are gone, distinct ones in every row.

    Args:
        source: the whole.
        layers: in ascending order; all by default.
        experts: number of routed experts; all by default.
        vocab: number of tokens; all by default.
    Raises:
        ConfigError: there are no such parts, or what is left is no model.
    """
    config = source.config
    chosen = checked_layers(config, range(config.num_hidden_layers) if layers is None else layers)
    experts = config.n_routed_experts if experts is None else experts
    vocab = config.vocab_size if vocab is None else vocab
    for field, least, got, most in (
        ("experts", config.num_experts_per_tok, experts, config.n_routed_experts),
        ("vocab", 1 + max((config.bos_token_id or 0, *config.eos_token_id)), vocab, config.vocab_size),
    ):
        if not least <= got <= most:
            raise ConfigError(
                f"{field}: expected {least} to {most}, got {got}", field=field, expected=f"{least}..{most}", got=got
            )
    kept = attrs.evolve(slice_config(config, chosen), n_routed_experts=experts, vocab_size=vocab)
    return SlicedSource(config=kept, source=source, layers=chosen)


def _place(piece: Piece) -> str:
    """Name the place of a weight; slices cannot be keys, and the draft block repeats paths of the model."""
    owner = DRAFT if piece.name.startswith(DRAFT) else ""
    return f"{owner}{piece.leaf} {piece.block}"


def _cut(found: Found, block: tuple[int | slice, ...], tensors: tuple[Tensor, ...]) -> Tensor | StoredWeight:
    """Cut an official tensor out of the tensors of a file."""
    if found.scale is None:
        return tensors[0][block]
    codes, scales = tensors
    at = tuple(index for index in block if isinstance(index, int))
    rows = next((index for index in block if isinstance(index, slice)), None)
    codes, scales = codes[at], scales[at]
    if rows is None:
        return as_stored(found.form, codes, scales)
    if found.form == "fp4":
        return as_stored("fp4", codes[rows], scales[rows])
    if rows.start % BLOCK == 0:
        return as_stored("fp8", codes[rows], scales[rows.start // BLOCK : ceil(rows.stop / BLOCK)])
    # A block runs across the edge, so only the numbers can be parted.
    return expand(as_stored("fp8", codes, scales), torch.float32)[rows]


def _renumbered(table: Tensor, n_experts: int) -> Tensor:
    """Give tables of experts ids below ``n_experts``, distinct in every row; ids that fit stay if they can."""
    kept = table % n_experts
    for column in range(1, table.shape[1]):
        for _ in range(n_experts):
            is_taken = (kept[:, :column] == kept[:, column : column + 1]).any(dim=1)
            kept[:, column] = torch.where(is_taken, (kept[:, column] + 1) % n_experts, kept[:, column])
    return kept
