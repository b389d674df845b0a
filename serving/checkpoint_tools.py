"""What ``purestep convert`` and ``purestep make-tiny`` do: write a checkpoint from another one, or from chance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from ..model.checkpoint import read_config
from ..model.layout import Dialect
from ..model.random_source import RandomSource
from ..model.shards import CONFIG_FILE, INDEX_FILE
from ..model.sources import WeightSource, folder_source, sliced_source
from ..model.storage import FORMS
from ..model.streaming import SUMS_FILE, WRITING_FILE, stream_checkpoint
from ..state.config import Config
from ..state.errors import ConfigError
from ..state.released import RELEASED

__all__ = ["NAMES", "convert", "make_tiny", "parse_layers"]

NAMES: Final[Mapping[str, Dialect]] = {"official": "official", "transformers": "modules"}
"""Whose names tensors can be given."""

_LARGEST_OTHER: Final = 1 << 28
"""Bytes up to which a file beside the weights is copied with them."""

Progress = Callable[[int, int, str], None]

_T = TypeVar("_T")


def convert(
    source: Path,
    out: Path,
    *,
    form: str | None,
    names: str,
    max_shard_bytes: int,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint in another form or under other names; an interrupted call goes on where it ended.

    Args:
        source: folder of the checkpoint.
        out: folder to write to.
        form: a name in ``FORMS``; default the one that it has.
        names: a name in ``NAMES``.
        max_shard_bytes: of one file.
        progress: called as (bytes done, bytes in all, name).
    Raises:
        CheckpointError: the source cannot be loaded, or ``out`` holds something else.
        ConfigError: no such form or names, or no single form to keep.
    """
    dialect, found = _choose("names", names, NAMES), folder_source(source)
    if form is not None:
        storage = _choose("form", form, FORMS)
    elif found.storage is not None:
        storage = found.storage
    else:
        raise ConfigError(
            f"form: expected one of {', '.join(FORMS)} for weights that have several forms, got none", field="form"
        )
    stream_checkpoint(
        out,
        found,
        storage,
        dialect=dialect,
        max_shard_bytes=max_shard_bytes,
        others=_others(source),
        progress=progress,
    )


def make_tiny(
    out: Path,
    *,
    source: Path | None,
    like: str,
    layers: tuple[int, ...] | None,
    experts: int | None,
    vocab: int | None,
    form: str | None,
    names: str,
    draft: bool,
    seed: int,
    max_shard_bytes: int,
    progress: Progress | None = None,
) -> Config:
    """Write a small checkpoint: part of a real one, or random numbers in the shape of one.

    Args:
        out: folder to write to.
        source: folder of a checkpoint to take a part of; None draws random weights.
        like: without a source, a name in ``RELEASED`` or a folder with a ``config.json``.
        layers: to keep; default all.
        experts: to keep of the routed ones; default all.
        vocab: tokens to keep; default all.
        form: a name in ``FORMS``; default the source's own, or "fp4".
        names: a name in ``NAMES``.
        draft: whether random weights have a draft block.
        seed: of random weights.
        max_shard_bytes: of one file.
        progress: called as (bytes done, bytes in all, name).
    Returns:
        The numbers of what was written.
    Raises:
        CheckpointError: the source cannot be loaded, or ``out`` holds something else.
        ConfigError: no such form, names, layers, experts or tokens.
    """
    dialect = _choose("names", names, NAMES)
    storage = None if form is None else _choose("form", form, FORMS)
    whole: WeightSource
    if source is None:
        storage = storage or FORMS["fp4"]
        config = RELEASED[like] if like in RELEASED else read_config(like)
        whole = RandomSource(config=config, has_draft=draft, storage=storage, seed=seed)
    else:
        found = folder_source(source)
        storage, whole = storage or found.storage or FORMS["fp4"], found
    part = sliced_source(whole, layers=layers, experts=experts, vocab=vocab)
    others = () if source is None or part.config.vocab_size < whole.config.vocab_size else _others(source)
    stream_checkpoint(
        out, part, storage, dialect=dialect, max_shard_bytes=max_shard_bytes, others=others, progress=progress
    )
    return part.config


def parse_layers(text: str) -> tuple[int, ...]:
    """Read layers written as ``0,2,5-8``.

    Raises:
        ConfigError: it is not such a list.
    """
    found: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    except ValueError as error:
        raise ConfigError(
            f"layers: expected numbers and ranges such as 0,2,5-8, got {text!r}", field="layers", got=text
        ) from error
    return tuple(found)


def _choose(field: str, name: str, of: Mapping[str, _T]) -> _T:
    if name not in of:
        names = ", ".join(of)
        raise ConfigError(f"{field}: expected one of {names}, got {name!r}", field=field, expected=names, got=name)
    return of[name]


def _others(folder: Path) -> Iterable[Path]:
    """List the files beside the weights, such as the tokenizer."""
    own = {CONFIG_FILE, INDEX_FILE, SUMS_FILE, WRITING_FILE}
    for path in sorted(folder.iterdir()):
        is_weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".part")
        if path.is_file() and path.name not in own and not is_weights and path.stat().st_size <= _LARGEST_OTHER:
            yield path
