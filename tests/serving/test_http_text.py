"""The text of replies on every endpoint: characters and stop strings over tokens, ends, and counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import purestep as ps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.http import Server, running
from kit.protocols import CHATS, PATHS, Said, ask, body_of
from kit.stand_in import StandIn, say
from kit.steps import examples
from purestep.serving.text import TextStream, cut_at_stop, read_vocabulary

MODEL = ps.load_model("tiny")
WORDS = read_vocabulary(MODEL.tokenizer, MODEL.config.vocab_size)
BYTES = {WORDS.pieces[token_id]: token_id for token_id in range(259) if len(WORDS.pieces[token_id]) == 1}
END_THINK = MODEL.tokenizer.token_to_id("</think>")
# Those that end a text and those that chats know are what other tests are about.
PLAIN_IDS = st.integers(3, MODEL.tokenizer.token_to_id("<｜User｜>") - 1)
STOPPING = ("completions", "chat", "messages")


@attrs.define
class Site:
    """A server and the engine behind it, whose script tests exchange."""

    server: Server
    engine: StandIn

    def says(self, ids: list[int], protocol: str, **wish: Any) -> Said:
        """What an endpoint makes of a reply of these ids, as a single choice."""
        self.engine.source = say(ids)
        (said,) = ask(self.server, protocol, **wish)
        return said


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    engine = StandIn(say([]))
    with running(MODEL, engine, context=400) as server:
        yield Site(server, engine)


@st.composite
def spelled(draw: st.DrawFn, alphabet: str) -> tuple[str, list[int]]:
    """A text and ids that spell it, cut anywhere between its bytes."""
    text = draw(st.text(alphabet, min_size=1, max_size=12))
    raw = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, len(raw) - 1), max_size=len(raw)))) if len(raw) > 1 else []
    ids: list[int] = []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        part = raw[start:end]
        try:
            ids += WORDS.encode(part.decode())
        except UnicodeDecodeError:
            ids += [BYTES[bytes([byte])] for byte in part]
    return text, ids


@examples(12)
@given(spelled("a b😀👩‍🚀한글e\u0301नि\u200d"))
def test_characters_cut_at_any_byte(site: Site, case: tuple[str, list[int]]) -> None:
    """Emoji, Hangul and combining marks that are cut between any bytes come whole on every endpoint."""
    text, ids = case
    for protocol in PATHS:
        assert site.says(ids, protocol, limit=80).text == text


@pytest.mark.parametrize("text", ["😀", " 😀", " 한", "é", " e\u0301", "👩‍🚀", "\ufeff.", "a\u2028b"])
def test_every_byte_a_token(site: Site, text: str) -> None:
    """A text of one token a byte comes whole, after a token led by a space too."""
    for lead in ("", " and"):
        ids = [*WORDS.encode(lead), *(BYTES[bytes([byte])] for byte in text.encode())]
        for protocol in PATHS:
            assert site.says(ids, protocol).text == lead + text


@examples(15)
@given(st.lists(PLAIN_IDS | st.sampled_from(sorted(BYTES.values())), max_size=10))
def test_bytes_that_are_no_text(site: Site, ids: list[int]) -> None:
    """Bytes that are no characters become U+FFFD as in one decoding, but for those at the very end; everywhere."""
    whole = WORDS.decode(ids).rstrip("\ufffd")
    # Chats do not begin with empty lines.
    for protocol in PATHS:
        assert site.says(ids, protocol).text == (whole if protocol == "completions" else whole.lstrip("\n"))
    stream = TextStream(WORDS)
    assert "".join([*map(stream.push, ids), stream.finish()]) == whole


@examples(20)
@given(spelled("ab é😀"), st.lists(st.text("ab é", min_size=1, max_size=4), max_size=3), st.sampled_from([1, 3]))
def test_stop_strings(site: Site, case: tuple[str, list[int]], stops: list[str], n: int) -> None:
    """Wherever tokens end, the text ends before the first complete stop string, on every endpoint that takes any."""
    text, ids = case
    at = cut_at_stop(text, stops)
    site.engine.source = say(ids)
    for protocol in STOPPING:
        many = {"n": n} if protocol != "messages" else {}
        for said in ask(site.server, protocol, stops=stops, limit=80, **many):
            assert (said.text, said.reason) == (text[:at], "stop")


@pytest.mark.parametrize("protocol", STOPPING)
def test_stop_strings_hold_from_the_first_word_on(site: Site, protocol: str) -> None:
    """A stop string that is the whole reply leaves nothing; one that only begins is said in the end."""
    assert site.says(WORDS.encode("END"), protocol, stops=["END"]).text == ""
    assert site.says(WORDS.encode("ENDE"), protocol, stops=["ENDED"]).text == "ENDE"
    cut = site.says(WORDS.encode("a EN") + WORDS.encode("x") * 20, protocol, stops=["ENx" * 9], limit=8)
    assert (cut.text[:4], cut.reason) == ("a EN", "length")


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("protocol", PATHS)
def test_replies_that_end_at_once(site: Site, protocol: str, thinking: bool) -> None:
    """A first token that ends the reply gives an empty text and one last word, and counts as the token it is."""
    wish = {} if protocol == "completions" else {"thinks": thinking}
    said = site.says([], protocol, **wish)
    assert (said.text, said.reasoning, said.reason, said.calls) == ("", "", "stop", ())
    assert said.counts[2] == 1
    if protocol in CHATS and thinking:
        said = site.says([END_THINK], protocol, **wish)
        assert (said.text, said.reasoning, said.reason) == ("", "", "stop")


@examples(10)
@given(st.lists(PLAIN_IDS, max_size=6), st.lists(PLAIN_IDS, max_size=6), st.integers(1, 14))
def test_counts_are_those_of_the_engine(site: Site, thought: list[int], answer: list[int], limit: int) -> None:
    """Tokens are counted as the engine makes them, thinking and ends included, streamed and plain, everywhere."""
    ids = [*thought, END_THINK, *answer]
    for protocol in CHATS:
        said = site.says(ids, protocol, thinks=True, limit=limit)
        assert said.counts == (len(site.engine.asks[-1].prompt_ids), 3, min(limit, len(ids) + 1))
        assert said.reason == ("length" if limit <= len(ids) else "stop")


def test_thinking_is_counted(site: Site) -> None:
    """The tokens of thinking are part of those of the reply and counted apart, streamed and plain."""
    site.engine.source = say([*WORDS.encode("one two"), END_THINK, *WORDS.encode("three")])
    body = body_of("chat", thinks=True)
    plain = site.server.post(PATHS["chat"], body).json["usage"]
    streamed = site.server.post(PATHS["chat"], body | {"stream": True, "stream_options": {"include_usage": True}})
    assert streamed.events[-2]["usage"] == plain
    assert plain["completion_tokens_details"]["reasoning_tokens"] == len(WORDS.encode("one two"))
    found = site.server.post(PATHS["responses"], body_of("responses", thinks=True)).json["usage"]
    assert found["output_tokens_details"] == plain["completion_tokens_details"]
