"""Which tokens end a text, wherever a checkpoint says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import tokenizers

from ..state.config import Config
from ..state.errors import CheckpointError
from .shards import read_json

__all__ = ["stop_tokens"]

GENERATION_FILE: Final = "generation_config.json"
TOKENIZER_FILE: Final = "tokenizer_config.json"


def stop_tokens(folder: Path, config: Config, tokenizer: tokenizers.Tokenizer | None) -> tuple[int, ...]:
    """Collect the ids that end a text: those of the config, the generation config and the tokenizer's config.

    Each of the files may be edited without the others, so that any of them may hold the one that the model uses.

    Args:
        folder: of the checkpoint.
        config: the numbers.
        tokenizer: that turns the name of an end token into its id; None where the checkpoint has none.
    Returns:
        The ids, each once, those of the config first.
    Raises:
        CheckpointError: a file that names no token of the vocabulary.
    """
    found = [*config.eos_token_id, *_generation_ids(folder / GENERATION_FILE)]
    if tokenizer is not None:
        found += _tokenizer_ids(folder / TOKENIZER_FILE, tokenizer)
    for token_id in found:
        if not 0 <= token_id < config.vocab_size:
            raise CheckpointError(
                f"{folder}: expected end tokens from 0 to {config.vocab_size - 1}, got {token_id}",
                field="eos_token_id",
                expected=f"< {config.vocab_size}",
                got=token_id,
            )
    return tuple(dict.fromkeys(found))


def _generation_ids(file: Path) -> list[int]:
    named = _read(file).get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise CheckpointError(
            f"{file}: eos_token_id: expected a token id, a list of them, or null, got {named!r}",
            field="eos_token_id",
            expected="ids",
            got=named,
        )
    return ids


def _tokenizer_ids(file: Path, tokenizer: tokenizers.Tokenizer) -> Iterator[int]:
    named = _read(file).get("eos_token")
    # Files of Hugging Face's libraries hold the text of a token, or a record of it.
    text = named.get("content") if isinstance(named, dict) else named
    if text is None:
        return
    token_id = tokenizer.token_to_id(text) if isinstance(text, str) else None
    if token_id is None:
        raise CheckpointError(
            f"{file}: eos_token: expected a token of tokenizer.json, got {text!r}",
            field="eos_token",
            expected="a token",
            got=text,
        )
    yield token_id


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    found = read_json(file)
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(found).__name__}", field=file.name)
    return found
