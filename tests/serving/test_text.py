"""Token ids to text: characters over tokens, stop strings over tokens."""

from __future__ import annotations

import json
from pathlib import Path

import deepseek_recipe as recipe
import purestep as ps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.steps import examples
from purestep.serving.text import TextStream, Vocabulary, cut_at_stop, read_vocabulary
from tokenizers import Tokenizer

FILE = Path(ps.__file__).parent / "model" / "tiny" / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(FILE))
PARSERS_TOKENIZER = recipe.Tokenizer.from_file(str(FILE))
SIZE = TOKENIZER.get_vocab_size()
VOCABULARY = read_vocabulary(TOKENIZER, SIZE + 3)
BYTES = {VOCABULARY.pieces[token_id]: token_id for token_id in range(SIZE) if len(VOCABULARY.pieces[token_id]) == 1}

TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from("abcab 😀한é\u0301\n"), max_size=30)
NEAR = st.text("ab", min_size=1, max_size=6)
IDS = st.lists(st.integers(0, SIZE - 1), max_size=25)


def by_bytes(text: str) -> list[int]:
    """Spell a text with one token for every byte, which splits every character wherever it can be split."""
    return [BYTES[bytes([byte])] for byte in text.encode()]


@st.composite
def spelled(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> tuple[str, list[int]]:
    """A text, and ids that spell it in some mixture of whole words and single bytes."""
    parts = draw(st.lists(texts, max_size=4))
    ids = [by_bytes(part) if draw(st.booleans()) else VOCABULARY.encode(part) for part in parts]
    return "".join(parts), [token_id for part in ids for token_id in part]


def said(ids: list[int], stops: tuple[str, ...] = (), vocabulary: Vocabulary = VOCABULARY) -> list[str]:
    """All pieces of a stream."""
    stream = TextStream(vocabulary, stops)
    return [*map(stream.push, ids), stream.finish()]


@examples(100)
@given(spelled(TEXTS))
def test_every_spelling_of_a_text_gives_the_text(case: tuple[str, list[int]]) -> None:
    """However characters are split over tokens, the joined pieces are the text, whole characters each."""
    text, ids = case
    assert "".join(said(ids)) == VOCABULARY.decode(ids) == text


@examples(100)
@given(IDS)
def test_any_ids_give_their_decoding(ids: list[int]) -> None:
    """Any ids give the same text as decoding them at once; only bytes at the end that are no character are left out."""
    whole = VOCABULARY.decode(ids)
    assert whole == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert "".join(said(ids)) == whole.rstrip("\ufffd")


@examples(150)
@given(spelled(NEAR), st.lists(NEAR, max_size=4))
def test_stop_strings_over_token_borders(case: tuple[str, list[int]], stops: list[str]) -> None:
    """The text ends before the stop string that is complete first, wherever the tokens end."""
    text, ids = case
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = text
    if ends:
        expected = min(
            (text[: ends[0]].removesuffix(stop) for stop in stops if text[: ends[0]].endswith(stop)), key=len
        )
    assert "".join(said(ids, tuple(stops))) == expected
    assert cut_at_stop(text, stops) == (len(expected) if ends else None)


@examples(60)
@given(spelled(NEAR), st.lists(NEAR, max_size=3))
def test_nothing_is_said_too_early_or_too_late(case: tuple[str, list[int]], stops: list[str]) -> None:
    """After every token all is said but what may still become a stop string."""
    _, ids = case
    stream, so_far = TextStream(VOCABULARY, stops), ""
    for at, token_id in enumerate(ids):
        so_far += stream.push(token_id)
        whole = VOCABULARY.decode(ids[: at + 1])
        if stream.is_stopped:
            break
        rest = whole.removeprefix(so_far)
        assert not rest or any(stop.startswith(rest) and stop != rest for stop in stops)


@examples(60)
@given(spelled(st.one_of(NEAR, TEXTS)), st.lists(NEAR, max_size=3, unique=True))
def test_the_parser_of_chats_says_the_same(case: tuple[str, list[int]], stops: list[str]) -> None:
    """Chats, whose text another library puts together, say what completions say, but for line breaks at the start."""
    _, ids = case
    options = recipe.ParsingOptions(parse_tool_calls=False, stop_sequences=sorted(stops, key=len, reverse=True))
    body = '{"model": "DeepSeek-V4-Pro", "messages": [{"role": "user", "content": "x"}]}'
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions(default_thinking_mode=False))
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "", "")
    parser = recipe.StreamProcessor(generator, options, PARSERS_TOKENIZER)
    reply = recipe.ChatCompletionResponse("", "", 0, 0, 0)
    chunks = parser.push(recipe.InferenceChunk.ready())
    for token_id in ids:
        if not parser.finished:
            chunks += parser.push(recipe.InferenceChunk.tokens([token_id]))
    if not parser.finished:
        chunks += parser.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    for chunk in [*chunks, *parser.finish()]:
        reply.accumulate(chunk)
    content = json.loads(reply.to_json())["choices"][0]["message"]["content"]
    assert content == "".join(said(ids, tuple(stops))).lstrip("\n")


@pytest.mark.parametrize("spelling", ["<think>", "</think>", "<｜User｜>", "｜DSML｜", "<｜end▁of▁sentence｜>"])
def test_text_of_users_never_becomes_a_control_token(spelling: str) -> None:
    """Spellings of control tokens are encoded as the text they are."""
    control = TOKENIZER.token_to_id(spelling)
    ids = VOCABULARY.encode(f"a {spelling} b")
    assert control not in ids
    assert VOCABULARY.decode(ids) == f"a {spelling} b"


def test_names_of_tokens_that_are_no_text() -> None:
    """A token that is part of a character is named by its bytes, any other by its text."""
    first, *_ = by_bytes("😀")
    assert VOCABULARY.name(first) == "bytes:\\xf0"
    assert VOCABULARY.name(1) == "<｜end▁of▁sentence｜>"
    assert VOCABULARY.spoken(1) == b""
    assert VOCABULARY.spoken(SIZE) == b""
