"""Token ids to text, as they come: characters that span tokens, and strings that end a reply.

Source: none; the alphabet of byte-level BPE is the one of GPT-2's published encoder, which every such tokenizer uses.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import attrs
from tokenizers import Tokenizer

from ..step.generate import without_control_tokens

__all__ = ["TextStream", "Vocabulary", "cut_at_stop", "read_vocabulary"]

_PRINTED_AS_THEMSELVES: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that the alphabet writes as the character of their number; the others follow from 0x100 on, in order."""

_BROKEN: Final = "\ufffd"
"""Stands for bytes that are no UTF-8."""


def _alphabet() -> dict[str, int]:
    others = [byte for byte in range(256) if byte not in _PRINTED_AS_THEMSELVES]
    letters = {chr(byte): byte for byte in _PRINTED_AS_THEMSELVES}
    return letters | {chr(0x100 + at): byte for at, byte in enumerate(others)}


@attrs.frozen(eq=False, kw_only=True)
class Vocabulary:
    """What every token id says.

    Attributes:
        tokenizer: of the model, with its control tokens.
        plain: the same without them, so that no text of a user becomes one.
        pieces: the bytes of every id; none for ids that the tokenizer lacks.
        silent: ids that are not part of a text: those that begin, end and pad it.
        longest: bytes of the longest piece.
    """

    tokenizer: Tokenizer
    plain: Tokenizer
    pieces: tuple[bytes, ...]
    silent: frozenset[int]
    longest: int

    def encode(self, text: str) -> list[int]:
        """Turn a text into ids, spellings of control tokens included."""
        # Alone among the ways to encode, a batch lets other threads go on.
        (found,) = self.plain.encode_batch_fast([text], add_special_tokens=False)
        return list(found.ids)

    def spoken(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text."""
        return b"" if token_id in self.silent else self.pieces[token_id]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Turn ids into the whole text; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.spoken, token_ids)).decode("utf-8", errors="replace")

    def name(self, token_id: int) -> str:
        """Write a token as reports of log-probabilities do: its text, or its bytes where they are no whole text."""
        piece = self.pieces[token_id]
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """Read what every id says from a byte-level tokenizer.

    Args:
        tokenizer: of the model.
        vocab_size: V, which may be larger than the tokenizer's.
    """
    added = {one["id"]: one for one in json.loads(tokenizer.to_str())["added_tokens"]}
    alphabet = _alphabet()
    pieces = [b""] * vocab_size
    for piece, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size:
            is_text = token_id in added or not all(letter in alphabet for letter in piece)
            pieces[token_id] = piece.encode() if is_text else bytes(alphabet[letter] for letter in piece)
    return Vocabulary(
        tokenizer=tokenizer,
        plain=without_control_tokens(tokenizer),
        pieces=tuple(pieces),
        silent=frozenset(token_id for token_id, one in added.items() if one["special"]),
        longest=max(map(len, pieces)),
    )


def cut_at_stop(text: str, stops: Sequence[str]) -> int | None:
    """Find where a text ends because of a stop string.

    The string that is complete first counts, and of several that end there the longest, so that it does not matter
    in which pieces the text came.

    Returns:
        Characters before the stop string, or None without one.
    """
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


class TextStream:
    """Puts together one reply's text, token by token.

    Args:
        vocabulary: what the ids say.
        stops: strings that end the reply; they are no part of it.
    """

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str] = ()) -> None:
        self._vocabulary = vocabulary
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.n_characters = 0
        """Characters said so far, those included that are held back."""
        self.is_stopped = False
        """Whether a stop string was met; nothing is said after it."""

    def push(self, token_id: int) -> str:
        """Take a token and return what can be said for certain: whole characters that begin no stop string.

        Bytes that are no character become U+FFFD, once a character follows: at the end they are left out, here as in
        the replies of chats, whose text deepseek-recipe puts together.
        """
        if self.is_stopped:
            return ""
        new = self._decoder.decode(self._vocabulary.spoken(token_id))
        self.n_characters += len(new)
        text = self._held + new
        end = cut_at_stop(text, self._stops)
        self.is_stopped = end is not None
        if end is None:
            end = len(text) - max(map(len, _beginnings(text, self._stops)), default=0)
            end = min(end, len(text.rstrip(_BROKEN)))
        self._held = "" if self.is_stopped else text[end:]
        return text[:end]

    def finish(self) -> str:
        """Return what was held back, as no more tokens come; bytes at the end that are no character are left out."""
        rest, self._held = self._held.rstrip(_BROKEN), ""
        return rest


def _beginnings(text: str, stops: Iterable[str]) -> Iterator[str]:
    """Yield every proper beginning of a stop string that the text ends in."""
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                yield stop[:length]
                break
