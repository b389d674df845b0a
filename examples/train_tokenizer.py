"""Train the tiny model's tokenizer: a byte-level BPE with DeepSeek-V4's control tokens.

What the reader learns: how V4 text becomes ids. The pre-tokenisation, the missing automatic BOS and the exact spelling
of the control tokens follow V4; only the vocabulary is small, because it is trained on one book.
"""

from __future__ import annotations

import lzma
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split
from tokenizers.trainers import BpeTrainer

__all__ = ["CONTROL_TOKENS", "SPECIAL_TOKENS", "read_text", "train_tokenizer"]

DATA = Path(__file__).parent / "data"

SPECIAL_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
"""Ids 0, 1 and 2, as in V4; a decoder told to skip special tokens drops these."""

CONTROL_TOKENS = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜extracted_url｜>",
    "<｜read_url｜>",
)
"""Tokens that the chat encoding writes. As in V4 they are not special: a parser must see them in decoded text."""

DIGITS = r"\p{N}{1,3}"
CJK = r"[一-龥぀-ヿ]+"
WORDS = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_text(name: str) -> str:
    """Read one text of ``examples/data``, compressed (``.xz``) or plain."""
    path = DATA / name
    return (lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()).decode()


def split_text() -> PreTokenizer:
    """Build V4's pre-tokenisation: digits by threes, CJK runs, words with their leading space, then bytes."""
    pieces = [Split(Regex(pattern), behavior="isolated") for pattern in (DIGITS, CJK, WORDS)]
    return Sequence([*pieces, ByteLevel(add_prefix_space=False, use_regex=False)])


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on ``text``.

    Args:
        text: the training text, one verse a line.
        vocab_size: all entries: special tokens, 256 bytes, merges, control tokens.
    Returns:
        A tokenizer that adds no BOS, knows every byte, and gives back any text exactly.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = split_text()
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in CONTROL_TOKENS])
    return tokenizer


def main() -> None:
    """Train, and check on the held-out text that nothing is lost."""
    tokenizer = train_tokenizer(read_text("kjv-train.txt.xz"), vocab_size=1280)
    text = read_text("kjv-heldout.txt")
    ids = tokenizer.encode(text).ids
    if tokenizer.decode(ids, skip_special_tokens=False) != text:
        raise SystemExit("the held-out text did not survive the round trip")
    print(f"{tokenizer.get_vocab_size()} entries, {len(text.encode()) / len(ids):.2f} bytes a token, nothing lost")


if __name__ == "__main__":
    main()
