"""What a load test sends, and when: drawn from a seed or read from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
from tokenizers import Tokenizer

from ..state.errors import ConfigError, RequestError

__all__ = ["Endpoint", "Prompt", "draw_arrivals", "draw_prompts", "read_prompts", "read_tokenizer"]


class Endpoint(StrEnum):
    """Where requests go."""

    COMPLETIONS = "completions"
    CHAT = "chat"


@attrs.frozen
class Prompt:
    """One request to send.

    Attributes:
        text: of the prompt.
        max_tokens: of the reply.
    """

    text: str
    max_tokens: int


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint.

    Raises:
        ConfigError: the folder has none.
    """
    file = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    # What the library raises is no narrower.
    except Exception as error:
        raise ConfigError(f"tokenizer: expected one in {file}, got none: {error}", field="tokenizer") from error


def draw_prompts(
    tokenizer: Tokenizer, count: int, *, input_len: int, output_len: int, shared_prefix_len: int, seed: int
) -> tuple[Prompt, ...]:
    """Draw prompts of words that are one token each, so that their lengths in tokens are exact.

    Args:
        tokenizer: that counts; a server with another one counts otherwise.
        count: of prompts.
        input_len: tokens of a prompt that are its own.
        output_len: tokens of a reply.
        shared_prefix_len: tokens before them that are the same in all prompts.
        seed: same seed, same prompts.
    Raises:
        ConfigError: a tokenizer that has no such words.
    """
    words, draw = _words(tokenizer), random.Random(seed)
    prefix = draw.choices(words, k=shared_prefix_len)
    return tuple(
        Prompt("".join(prefix + draw.choices(words, k=input_len)), max_tokens=output_len) for _ in range(count)
    )


def draw_arrivals(count: int, *, rate: float, seed: int) -> tuple[float, ...]:
    """Draw when requests start, in seconds: a Poisson process of so many a second, the first one at once."""
    draw = random.Random(seed)
    return tuple(accumulate((draw.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def read_prompts(path: Path, count: int | None, *, output_len: int) -> tuple[Prompt, ...]:
    """Read prompts from lines of JSON with ``prompt`` and, where a line has its own, ``max_tokens``.

    Args:
        path: of the file.
        count: how many of the first to take; None for all.
        output_len: tokens of a reply to a line that says nothing of it.
    Raises:
        RequestError: the file cannot be read, has too few lines, or a line is not one.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"dataset: expected a file of JSON lines in UTF-8, got: {error}", field="dataset") from error
    found = tuple(_prompts(path, lines, output_len))
    if not found or (count or 0) > len(found):
        wanted = "at least one prompt" if count is None else f"{count} prompts"
        raise RequestError(
            f"{path}: expected {wanted}, got {len(found)}; ask for as many as there are",
            field="dataset",
            expected=wanted,
            got=len(found),
        )
    return found[:count]


def _prompts(path: Path, lines: Sequence[str], output_len: int) -> Iterator[Prompt]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found: Any = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        text = found.get("prompt") if isinstance(found, dict) else None
        most = found.get("max_tokens", output_len) if isinstance(found, dict) else None
        if not isinstance(text, str) or not text or not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise RequestError(
                f'{path}: line {number}: expected {{"prompt": "...", "max_tokens": 16}} with some text and at least '
                f"one token, got {line[:80]!r}; correct it or leave it out",
                field="dataset",
                got=line[:80],
            )
        yield Prompt(text, most)


def _words(tokenizer: Tokenizer) -> list[str]:
    """Find words, each with the space before it, that are one token wherever they stand; in order of their ids."""
    known = tokenizer.get_vocab(with_added_tokens=False)
    texts = (tokenizer.decode([token_id]) for token_id in sorted(known.values()))
    words = [text for text in texts if text[:1] == " " and text[1:].isascii() and text[1:].isalpha()]
    encoded = tokenizer.encode_batch([word * 2 for word in words], add_special_tokens=False)
    exact = [word for word, one in zip(words, encoded, strict=True) if len(one.ids) == 2]
    if not exact:
        raise ConfigError(
            "tokenizer: expected words that are one token together with the space before them, got none; "
            "give prompts with --dataset",
            field="tokenizer",
        )
    return exact
