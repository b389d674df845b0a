"""``/v1/chat/completions``: conversations in, messages out.

deepseek-recipe parses the replies; this file adds what it leaves to its user: choices, sampling, token ids, and counts.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import attrs
import deepseek_recipe as recipe

from .asks import Ask, Ended, Sampled
from .chat import ChatModel, ToolChoice, convert, encode, fresh_mask
from .constraints import choice_rule, json_rule, regex_rule
from .protocol import bad_request, check_body
from .protocol_fields import CHAT, choice_params, sampling_params, token_limit
from .protocol_run import Tally, TokenStream, check_end, finite, listen

__all__ = ["ChatRequest", "chat_pieces", "fold_chat", "read_chat"]

_OURS: Final = frozenset(
    {
        *("n", "seed", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
        *("repetition_penalty", "logit_bias", "stop_token_ids", "ignore_eos", "min_tokens", "return_token_ids"),
        *("max_tokens", "max_completion_tokens", "stream", "stream_options", "chat_template_kwargs", "tool_choice"),
    }
)
"""Fields that deepseek-recipe does not know, or narrows to what DeepSeek's own service allows."""


@attrs.frozen(eq=False, kw_only=True)
class ChatRequest:
    """A request, checked, converted and in token ids.

    Attributes:
        call: the request as deepseek-recipe converted it.
        asks: one generation for every choice.
        end_ids: ids that end a choice; they say nothing.
        return_ids: whether to report token ids.
    """

    call: recipe.ConversationRequest
    asks: tuple[Ask, ...]
    end_ids: frozenset[int]
    return_ids: bool


def read_chat(body: Mapping[str, Any], model: ChatModel) -> ChatRequest:
    """Check a request, convert it and encode its conversation.

    Args:
        body: the request, without nulls.
        model: that is asked.
    Raises:
        ApiError: the first field that cannot be honoured.
    """
    check_body(CHAT, body)
    call = convert(
        recipe.ChatCompletionRequest,
        _for_recipe(body, model),
        model,
        param="messages",
        format_param="response_format",
    )
    rules = _format_rules(body.get("response_format", {"type": "text"}))
    mask = fresh_mask(model, call.conversation, rules, _tool_choice(body), param="response_format")
    ids = encode(call, model)
    asked = body.get("max_completion_tokens", body.get("max_tokens"))
    limit = token_limit(asked, None, n_prompt=len(ids), context=model.context)
    logprobs = body.get("top_logprobs", 0) if body.get("logprobs") else None
    params = sampling_params(body, vocab_size=model.config.vocab_size, max_tokens=limit, logprobs=logprobs)
    if mask is not None and (body.get("ignore_eos") or body.get("min_tokens")):
        field = "ignore_eos" if body.get("ignore_eos") else "min_tokens"
        bad_request(
            f"{field}: expected nothing that holds back the end of a constrained reply; leave it out or drop "
            "response_format and tools",
            field,
            "unsupported_constraint",
        )
    asks = tuple(
        Ask(
            prompt_ids=ids,
            params=choice_params(params, choice),
            mask=None if mask is None else mask(),
        )
        for choice in range(body.get("n", 1))
    )
    ends = frozenset(body.get("stop_token_ids", ())) | (
        set() if body.get("ignore_eos") else {*model.config.eos_token_id}
    )
    return ChatRequest(call=call, asks=asks, end_ids=ends, return_ids=body.get("return_token_ids", False))


def _for_recipe(body: Mapping[str, Any], model: ChatModel) -> dict[str, Any]:
    """Leave what deepseek-recipe is to read, in the words it knows."""
    found = {name: one for name, one in body.items() if name not in _OURS}
    found["messages"] = [_message(one) for one in body["messages"]]
    found["thinking"] = {"type": "enabled" if _thinks(body, model) else "disabled"}
    if body.get("reasoning_effort") == "none":
        del found["reasoning_effort"]
    # A forced call is enforced by a grammar, after the thinking where there is any; the prompt is that of a free one.
    if body.get("tool_choice") == "none":
        found["tool_choice"] = "none"
    if body.get("response_format", {}).get("type") in ("regex", "choice"):
        del found["response_format"]
    return found


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: one for name, one in message.items() if one is not None and name != "reasoning"}
    if found["role"] == "developer":
        found["role"] = "system"
    if found["role"] == "assistant":
        found.setdefault("content", "")
        if message.get("reasoning") is not None:
            found.setdefault("reasoning_content", message["reasoning"])
    return found


def _thinks(body: Mapping[str, Any], model: ChatModel) -> bool:
    """Find whether a request thinks: by ``thinking``, template arguments, effort, or the server's default."""
    if "thinking" in body:
        return body["thinking"]["type"] != "disabled"
    arguments = body.get("chat_template_kwargs", {})
    for name in ("thinking", "enable_thinking"):
        if name in arguments:
            return bool(arguments[name])
    return body["reasoning_effort"] != "none" if "reasoning_effort" in body else model.thinking


def _tool_choice(body: Mapping[str, Any]) -> ToolChoice:
    choice, is_single = body.get("tool_choice", "auto"), body.get("parallel_tool_calls") is False
    if isinstance(choice, str):
        return ToolChoice(choice, is_single=is_single)
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        bad_request("tool_choice: expected the name of a function, got none", "tool_choice", "invalid_value")
    return ToolChoice("required", name, is_single=True)


def _format_rules(wanted: Mapping[str, Any]) -> str | None:
    kind, field = wanted["type"], "response_format"
    if kind == "text":
        return None
    if kind == "json_object":
        return json_rule({"type": "object"}, param=field)
    if kind == "json_schema":
        schema = wanted.get("json_schema", {}).get("schema", {})
        if not isinstance(schema, dict):
            bad_request(
                f"{field}.json_schema.schema: expected an object", f"{field}.json_schema.schema", "invalid_value"
            )
        return json_rule(schema, param=field)
    if kind not in wanted:
        bad_request(f"{field}.{kind}: expected this field, got none", f"{field}.{kind}", "missing_required_parameter")
    return regex_rule(wanted["regex"]) if kind == "regex" else choice_rule(wanted["choice"])


async def chat_pieces(
    streams: Sequence[TokenStream], request: ChatRequest, model: ChatModel, tally: Tally
) -> AsyncGenerator[dict[str, Any], None]:
    """Follow a request's generations and yield pieces of its choices, in the shape of a stream's ``choices``.

    Args:
        streams: one for each of the request's asks.
        request: what is asked.
        model: of the request.
        tally: counts the tokens.
    Raises:
        ApiError: a generation went wrong.
    """
    choices = [_Choice(request, index, model) for index in range(len(request.asks))]
    tally.n_prompt = len(request.asks[0].prompt_ids)
    cached: list[int] = []
    for choice in choices:
        for piece in choice.begin():
            yield piece
    async with aclosing(listen(streams)) as events:
        async for index, event in events:
            choice = choices[index]
            if isinstance(event, Ended):
                check_end(event)
                cached.append(event.n_cached)
                tally.n_cached = min(cached)
                for piece in choice.end(event):
                    yield piece
                tally.reasons.append(choice.reason)
                if choice.n_reasoning is not None:
                    tally.n_reasoning = (tally.n_reasoning or 0) + choice.n_reasoning
            elif not choice.is_stopped:
                tally.n_reply += 1
                for piece in choice.hear(event):
                    yield piece
                if choice.is_stopped:
                    streams[index].finish()


class _Choice:
    """One reply while it is being parsed."""

    def __init__(self, request: ChatRequest, index: int, model: ChatModel) -> None:
        self._request = request
        self._index = index
        self._ask = request.asks[index]
        generator = recipe.ChatCompletionRequest.chunk_generator(request.call, "", model.name)
        options = request.call.parsing_options
        # The grammar sees to it that the reply is the JSON asked for and nothing else.
        options.parse_json_output = False
        # Of stop strings that end at the same place the parser takes the first, completions the longest.
        options.stop_sequences = sorted(options.stop_sequences, key=len, reverse=True)
        self._parser = recipe.StreamProcessor(generator, options, model.tokenizer)
        self._ids: list[int] = []
        self._arguments: dict[int, str] = {}
        self.n_reasoning: int | None = None
        self.reason = "length"
        self.is_stopped = False

    def begin(self) -> list[dict[str, Any]]:
        """Return the piece that says whose turn it is."""
        return self._pieces(self._parser.push(recipe.InferenceChunk.ready()))

    def hear(self, event: Sampled) -> list[dict[str, Any]]:
        """Take a token; return the pieces that can be sent."""
        self._ids.append(event.token_id)
        if event.token_id in self._request.end_ids:
            return []
        logprobs = None
        if event.logprob is not None:
            top = [(one, finite(score)) for one, score in event.top]
            logprobs = [(finite(event.logprob), top)]
        chunks = self._parser.push(recipe.InferenceChunk.tokens([event.token_id], logprobs))
        self.is_stopped = self._parser.finished
        return self._pieces(chunks)

    def end(self, event: Ended) -> list[dict[str, Any]]:
        """Take the end; return the last pieces."""
        if self.is_stopped:
            return []
        reasons = recipe.InferenceFinishReason
        reason = reasons.Length if event.reason == "length" else reasons.Stop
        return self._pieces([*self._parser.push(recipe.InferenceChunk.finish(reason)), *self._parser.finish()])

    def _pieces(self, chunks: Iterable[Any]) -> list[dict[str, Any]]:
        """Write what the parser says as choices of this reply."""
        pieces = []
        for chunk in map(json.loads, (one.to_json() for one in chunks)):
            (piece,) = chunk["choices"]
            piece["index"] = self._index
            for call in piece["delta"].get("tool_calls", ()):
                said = call["function"].get("arguments", "")
                self._arguments[call["index"]] = self._arguments.get(call["index"], "") + said
            if self._request.return_ids:
                piece["token_ids"], self._ids = self._ids, []
            if piece["finish_reason"] is not None:
                self._finish(piece, chunk.get("usage") or {})
            pieces.append(piece)
        return pieces

    def _finish(self, piece: dict[str, Any], counts: Mapping[str, Any]) -> None:
        # A token or string of the client's own may end a reply inside a call, which then is none.
        if piece["finish_reason"] == "tool_calls" and not all(map(_is_json, self._arguments.values())):
            piece["finish_reason"] = "stop"
        self.reason = piece["finish_reason"]
        self.n_reasoning = counts.get("completion_tokens_details", {}).get("reasoning_tokens")
        piece["seed"] = self._ask.params.seed
        if self._request.return_ids:
            piece["prompt_token_ids"] = list(self._ask.prompt_ids)


def fold_chat(pieces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the pieces of a stream into whole choices, in order of their index."""
    choices: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        empty = {"index": piece["index"], "message": {"role": "assistant", "content": ""}, "logprobs": None}
        choice = choices.setdefault(piece["index"], empty)
        _fold_delta(choice["message"], piece["delta"])
        for name, found in piece.items():
            if name == "logprobs" and found and choice["logprobs"]:
                choice["logprobs"]["content"] += found["content"]
            elif name == "token_ids":
                choice[name] = choice.get(name, []) + found
            elif name != "delta" and found is not None:
                choice[name] = found
    return [choices[index] for index in sorted(choices)]


def _fold_delta(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        if delta.get(name) is not None:
            message[name] = message.get(name, "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({**call, "function": dict(call["function"])})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
