"""``/v1/completions``: prompts in, texts out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import attrs

from ..state.config import Config
from .asks import Ask, Ended, Sampled
from .protocol import bad_request, check_body
from .protocol_fields import COMPLETION, choice_params, sampling_params, stop_strings, token_limit
from .protocol_run import Tally, TokenStream, check_end, finite, listen
from .text import TextStream, Vocabulary

__all__ = ["CompletionRequest", "completion_pieces", "fold_completion", "read_completion"]

DEFAULT_TOKENS = 16
"""Tokens of a reply where the request does not say, as OpenAI's clients expect."""


@attrs.frozen(eq=False, kw_only=True)
class CompletionRequest:
    """A request, checked and in token ids.

    Attributes:
        asks: one generation for every choice, n for each prompt.
        n_each: choices of each prompt.
        stops: strings that end a choice.
        end_ids: ids that end a choice; they say nothing.
        logprobs: whether to report them.
        echo: whether the prompt is part of the text.
        is_score: whether nothing is to be sampled.
        return_ids: whether to report token ids.
    """

    asks: tuple[Ask, ...]
    n_each: int
    stops: tuple[str, ...]
    end_ids: frozenset[int]
    logprobs: bool
    echo: bool
    is_score: bool
    return_ids: bool


def read_completion(body: Mapping[str, Any], vocabulary: Vocabulary, config: Config, context: int) -> CompletionRequest:
    """Check a request and put its prompts into token ids.

    Args:
        body: the request, without nulls.
        vocabulary: of the model.
        config: of the model.
        context: tokens that a request may have in all.
    Raises:
        ApiError: the first field that cannot be honoured.
    """
    check_body(COMPLETION, body)
    n_each = body.get("n", 1)
    if body.get("best_of", n_each) != n_each:
        bad_request(f"best_of: expected as many as n = {n_each}, got {body['best_of']}", "best_of", "invalid_value")
    asks: list[Ask] = []
    for ids in _prompts(body["prompt"], vocabulary, config):
        limit = token_limit(body.get("max_tokens"), DEFAULT_TOKENS, n_prompt=len(ids), context=context)
        params = sampling_params(
            body, vocab_size=config.vocab_size, max_tokens=max(1, limit), logprobs=body.get("logprobs")
        )
        # Scores of the prompt are reported only where the prompt is.
        scored = body.get("logprobs") if body.get("echo") else None
        asks += [
            Ask(prompt_ids=ids, params=choice_params(params, choice), prompt_logprobs=scored)
            for choice in range(n_each)
        ]
    return CompletionRequest(
        asks=tuple(asks),
        n_each=n_each,
        stops=stop_strings(body),
        end_ids=frozenset(body.get("stop_token_ids", ()))
        | (set() if body.get("ignore_eos") else {*config.eos_token_id}),
        logprobs="logprobs" in body,
        echo=body.get("echo", False),
        is_score=body.get("max_tokens") == 0,
        return_ids=body.get("return_token_ids", False),
    )


def _prompts(prompt: Any, vocabulary: Vocabulary, config: Config) -> list[tuple[int, ...]]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    return [_prompt_ids(one, vocabulary, config) for one in prompt]


def _prompt_ids(prompt: str | list[int], vocabulary: Vocabulary, config: Config) -> tuple[int, ...]:
    if isinstance(prompt, str):
        bos = [] if config.bos_token_id is None else [config.bos_token_id]
        ids = bos + vocabulary.encode(prompt)
        return tuple(ids) if ids else bad_request("prompt: expected some text, got none", "prompt", "invalid_value")
    for token_id in prompt:
        if token_id >= config.vocab_size:
            bad_request(
                f"prompt: expected token ids below {config.vocab_size}, got {token_id}", "prompt", "invalid_value"
            )
    return tuple(prompt)


async def completion_pieces(
    streams: Sequence[TokenStream], request: CompletionRequest, vocabulary: Vocabulary, tally: Tally
) -> AsyncGenerator[dict[str, Any], None]:
    """Follow a request's generations and yield pieces of its choices; every piece has the index of its choice.

    Args:
        streams: one for each of the request's asks.
        request: what is asked.
        vocabulary: of the model.
        tally: counts the tokens.
    Raises:
        ApiError: a generation went wrong.
    """
    choices = [_Choice(request, index, vocabulary) for index in range(len(request.asks))]
    tally.n_prompt = sum(len(ask.prompt_ids) for ask in request.asks[:: request.n_each])
    cached: dict[int, list[int]] = {}
    async with aclosing(listen(streams)) as events:
        async for index, event in events:
            choice = choices[index]
            if isinstance(event, Ended):
                check_end(event)
                cached.setdefault(index // request.n_each, []).append(event.n_cached)
                tally.n_cached = sum(map(min, cached.values()))
                for piece in choice.end(event):
                    yield piece
                tally.reasons.append(choice.reason)
            elif not (choice.is_stopped or request.is_score):
                tally.n_reply += 1
                for piece in choice.hear(event):
                    yield piece
                if choice.is_stopped:
                    streams[index].finish()


class _Choice:
    """One reply while it is being made."""

    def __init__(self, request: CompletionRequest, index: int, vocabulary: Vocabulary) -> None:
        self._request = request
        self._index = index
        self._ask = request.asks[index]
        self._vocabulary = vocabulary
        self._text = TextStream(vocabulary, request.stops)
        self._prompt_text = vocabulary.decode(self._ask.prompt_ids) if request.echo else ""
        # A scored prompt comes first in the reply and last from the engine.
        self._waiting: list[dict[str, Any]] | None = [] if self._ask.prompt_logprobs is not None else None
        self._has_begun = False
        self.reason = "length"

    @property
    def is_stopped(self) -> bool:
        return self._text.is_stopped

    def hear(self, event: Sampled) -> Iterable[dict[str, Any]]:
        """Take a token; return the pieces that can be sent."""
        offset = len(self._prompt_text) + self._text.n_characters
        text = "" if event.token_id in self._request.end_ids else self._text.push(event.token_id)
        logprobs = None
        if self._request.logprobs:
            logprobs = _logprob_lists(self._vocabulary, [(event.token_id, event.logprob, event.top, offset)])
        if not (text or logprobs or self._request.return_ids):
            return ()
        return self._send(self._piece(text, logprobs, [event.token_id]))

    def end(self, event: Ended) -> Iterable[dict[str, Any]]:
        """Take the end; return the last pieces."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            yield from self._send(self._piece(self._prompt_text, self._prompt_scores(event), []))
            for piece in waiting:
                yield from self._send(piece)
        elif not self._has_begun:
            yield from self._send(self._piece("", None, []))
        self.reason = "stop" if self.is_stopped or event.reason == "stop" else "length"
        last = self._piece(self._text.finish(), None, [])
        last |= {"finish_reason": self.reason, "seed": self._ask.params.seed}
        if self._request.return_ids:
            last["prompt_token_ids"] = list(self._ask.prompt_ids)
        yield last

    def _send(self, piece: dict[str, Any]) -> list[dict[str, Any]]:
        if self._waiting is not None:
            self._waiting.append(piece)
            return []
        if not self._has_begun and self._ask.prompt_logprobs is None:
            piece = piece | {"text": self._prompt_text + piece["text"]}
        self._has_begun = True
        return [piece] if piece["text"] or piece["logprobs"] or piece.get("token_ids") else []

    def _piece(self, text: str, logprobs: dict[str, Any] | None, ids: list[int]) -> dict[str, Any]:
        piece = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return piece | ({"token_ids": ids} if self._request.return_ids else {})

    def _prompt_scores(self, event: Ended) -> dict[str, Any]:
        text, entries = TextStream(self._vocabulary), []
        for token_id, (logprob, top) in zip(self._ask.prompt_ids, event.prompt_logprobs or (), strict=True):
            entries.append((token_id, logprob, top, text.n_characters))
            text.push(token_id)
        return _logprob_lists(self._vocabulary, entries)


def _logprob_lists(
    vocabulary: Vocabulary, entries: Sequence[tuple[int, float | None, Sequence[tuple[int, float]], int]]
) -> dict[str, Any]:
    """Write (id, log-probability, likeliest, place in the text) as the four lists of OpenAI's shape."""
    return {
        "tokens": [vocabulary.name(token_id) for token_id, *_ in entries],
        "token_logprobs": [None if logprob is None else finite(logprob) for _, logprob, *_ in entries],
        "top_logprobs": [
            None if logprob is None else {vocabulary.name(one): finite(score) for one, score in top}
            for _, logprob, top, _ in entries
        ],
        "text_offset": [offset for *_, offset in entries],
    }


def fold_completion(pieces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the pieces of a stream into whole choices, in order of their index."""
    choices: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        choice = choices.setdefault(piece["index"], {"index": piece["index"], "text": "", "logprobs": None})
        for name, found in piece.items():
            if name == "logprobs" and found and choice["logprobs"]:
                choice["logprobs"] = {part: [*choice["logprobs"][part], *found[part]] for part in found}
            elif name in ("text", "token_ids"):
                choice[name] = choice.get(name, type(found)()) + found
            elif found is not None:
                choice[name] = found
    return [choices[index] for index in sorted(choices)]
