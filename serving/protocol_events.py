"""``/v1/responses`` and ``/v1/messages``: the protocols whose replies are sequences of named events.

deepseek-recipe makes the events and joins them; this file asks the engine in between and puts in the true counts.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import attrs
import deepseek_recipe as recipe

from .asks import Ask, Ended, Sampled
from .chat import ChatModel, ToolChoice, convert, encode, fresh_mask
from .constraints import json_rule
from .protocol import ApiError, bad_request, check_body, error_body
from .protocol_fields import MESSAGES, RESPONSES, sampling_params, token_limit
from .protocol_run import Tally, TokenStream, check_end, finite, listen

__all__ = ["EventRequest", "EventStream", "message_error", "read_message", "read_response"]

_SAMPLING: Final = (
    *("seed", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "logit_bias"),
)
"""Fields about sampling; deepseek-recipe does not know them, or narrows them to what DeepSeek's own service allows."""


@attrs.frozen(eq=False, kw_only=True)
class EventRequest:
    """A request of either protocol, checked, converted and in token ids.

    Attributes:
        call: the request as deepseek-recipe converted it.
        ask: the generation.
        generator: given the id of the reply, makes what writes its events.
        reply: given (id, time), makes what joins the events.
        count: writes the counts of a tally as this protocol does.
    """

    call: recipe.ConversationRequest
    ask: Ask
    generator: Callable[[str], Any]
    reply: Callable[[str, int], Any]
    count: Callable[[Tally], dict[str, Any]]


def read_response(body: Mapping[str, Any], model: ChatModel) -> EventRequest:
    """Check and convert the body of ``POST /v1/responses``.

    Args:
        body: the request, without nulls.
        model: that is asked.
    Raises:
        ApiError: the first field that cannot be honoured.
    """
    check_body(RESPONSES, body)
    given = _plain_choice(body, {"none"})
    call = convert(recipe.ResponsesRequest, given, model, param="input", format_param="text.format")
    choice = body.get("tool_choice", "auto")
    is_single = body.get("parallel_tool_calls") is False
    named = ToolChoice("required", _name(choice), is_single=True) if isinstance(choice, dict) else None
    logprobs = body.get("top_logprobs", 0) if "message.output_text.logprobs" in body.get("include", ()) else None
    ask = _ask(
        body,
        call,
        model,
        choice=named or ToolChoice(choice, is_single=is_single),
        limit=body.get("max_output_tokens"),
        logprobs=logprobs,
        schema=None if call.conversation.response_format == "text" else _schema(call.conversation),
        param="text.format",
    )
    echo = _response_request(body).echo()
    names = _response_request(given).namespace_tool_map(model.options)

    def generator(reply_id: str) -> recipe.ResponsesChunkGenerator:
        made = recipe.ResponsesRequest.chunk_generator(call, reply_id, model.name)
        return made.with_namespace_tool_map(names).with_echo(echo)

    return EventRequest(
        call=call,
        ask=ask,
        generator=generator,
        reply=lambda reply_id, now: recipe.ResponsesResponse(reply_id, model.name, now, len(ask.prompt_ids), 0),
        count=_response_usage,
    )


def read_message(body: Mapping[str, Any], model: ChatModel) -> EventRequest:
    """Check and convert the body of ``POST /v1/messages``.

    Args:
        body: the request, without nulls.
        model: that is asked.
    Raises:
        ApiError: the first field that cannot be honoured.
    """
    check_body(MESSAGES, body)
    choice = body.get("tool_choice", {"type": "auto"})
    given = {name: one for name, one in body.items() if name not in {*_SAMPLING, "tool_choice", "output_format"}}
    if choice["type"] == "none":
        given["tool_choice"] = {"type": "none"}
    call = convert(recipe.MessagesRequest, given, model, param="messages", format_param="output_config.format")
    mode = {"any": "required", "tool": "required"}.get(choice["type"], choice["type"])
    name = _name(choice) if choice["type"] == "tool" else None
    wanted = body.get("output_config", {}).get("format", body.get("output_format"))
    is_single = choice.get("disable_parallel_tool_use", False) or name is not None
    ask = _ask(
        body,
        call,
        model,
        choice=ToolChoice(mode, name, is_single=is_single),
        limit=body["max_tokens"],
        logprobs=None,
        schema=None if wanted is None else wanted["schema"],
        param="output_config.format",
    )
    return EventRequest(
        call=call,
        ask=ask,
        generator=lambda reply_id: recipe.MessagesRequest.chunk_generator(call, reply_id, model.name),
        reply=lambda reply_id, now: recipe.MessagesResponse(reply_id, model.name, now, len(ask.prompt_ids), 0),
        count=_message_usage,
    )


def _ask(
    body: Mapping[str, Any],
    call: recipe.ConversationRequest,
    model: ChatModel,
    *,
    choice: ToolChoice,
    limit: int | None,
    logprobs: int | None,
    schema: Mapping[str, Any] | None,
    param: str,
) -> Ask:
    rules = None if schema is None else json_rule(schema, param=param)
    mask = fresh_mask(model, call.conversation, rules, choice, param=param)
    ids = encode(call, model)
    params = sampling_params(
        {name: body[name] for name in _SAMPLING if name in body},
        vocab_size=model.config.vocab_size,
        max_tokens=token_limit(limit, None, n_prompt=len(ids), context=model.context),
        logprobs=logprobs,
    )
    return Ask(prompt_ids=ids, params=params, mask=None if mask is None else mask())


def _schema(conversation: recipe.Conversation) -> Mapping[str, Any]:
    return conversation.response_schema or {"type": "object"}


def _plain_choice(body: Mapping[str, Any], kept: set[str]) -> dict[str, Any]:
    """Leave out how to sample and which tool to force: a grammar enforces it."""
    left_out = {*_SAMPLING, "tool_choice", "max_output_tokens"}
    given = {name: one for name, one in body.items() if name not in left_out}
    choice = body.get("tool_choice")
    return given | ({"tool_choice": choice} if isinstance(choice, str) and choice in kept else {})


def _name(choice: Mapping[str, Any]) -> str:
    name = choice.get("name")
    if not isinstance(name, str):
        bad_request("tool_choice: expected the name of a tool, got none", "tool_choice.name", "invalid_value")
    return name


def _response_request(body: Mapping[str, Any]) -> recipe.ResponsesRequest:
    try:
        return recipe.ResponsesRequest(json.dumps(body))
    except ValueError as error:
        raise ApiError(str(error), param="input", code="invalid_value") from error


def _response_usage(tally: Tally) -> dict[str, Any]:
    return {
        "input_tokens": tally.n_prompt,
        "input_tokens_details": {"cached_tokens": tally.n_cached},
        "output_tokens": tally.n_reply,
        "output_tokens_details": {"reasoning_tokens": tally.n_reasoning or 0},
        "total_tokens": tally.n_prompt + tally.n_reply,
    }


def _message_usage(tally: Tally) -> dict[str, Any]:
    return {
        "input_tokens": tally.n_prompt - tally.n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tally.n_cached,
        "output_tokens": tally.n_reply,
    }


def message_error(error: ApiError) -> dict[str, Any]:
    """Write an error in the shape that Anthropic's clients read."""
    kinds = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
    shared: str = error_body(error)["error"]["type"]
    return {"type": "error", "error": {"type": kinds.get(error.status, shared), "message": str(error)}}


class EventStream:
    """One reply of either protocol, as events while it is made and as a whole afterwards.

    Args:
        request: what is asked.
        model: that replies.
        tally: counts the tokens.
        reply_id: of the reply.
        now: when it was asked for, in seconds since 1970.
        about: fields that the whole reply has besides.
    """

    def __init__(
        self,
        request: EventRequest,
        model: ChatModel,
        tally: Tally,
        *,
        reply_id: str,
        now: int,
        about: Mapping[str, Any],
    ) -> None:
        self._request = request
        self._tally = tally
        self._about = {**about, "seed": request.ask.params.seed}
        self._end_ids = frozenset(model.config.eos_token_id)
        options = request.call.parsing_options
        options.parse_json_output = False
        options.stop_sequences = sorted(options.stop_sequences, key=len, reverse=True)
        self._parser = recipe.StreamProcessor(request.generator(reply_id), options, model.tokenizer)
        self._reply = request.reply(reply_id, now)

    async def events(self, streams: Sequence[TokenStream]) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yield (name, event) as they come.

        Args:
            streams: the one generation.
        Raises:
            ApiError: the generation went wrong.
        """
        tally, (stream,) = self._tally, streams
        tally.n_prompt = len(self._request.ask.prompt_ids)
        counts = recipe.PromptUsage(prompt_tokens=tally.n_prompt)
        for event in self._written(self._parser.push(recipe.InferenceChunk.ready(prompt_usage=counts))):
            yield event
        last: list[Any] = []
        is_stopped = False
        async with aclosing(listen(streams)) as heard:
            async for _, item in heard:
                if isinstance(item, Ended):
                    check_end(item)
                    tally.n_cached = item.n_cached
                    last += self._finished(item, is_stopped=is_stopped)
                elif not is_stopped:
                    chunks = self._hear(item)
                    is_stopped = self._parser.finished
                    if is_stopped:
                        # The counts in the last events are not known before the generation has ended.
                        stream.finish()
                        last, chunks = chunks, []
                    for event in self._written(chunks):
                        yield event
        for event in self._written(last):
            yield event

    def whole(self) -> dict[str, Any]:
        """Return the whole reply, once all events have come."""
        found = json.loads(self._reply.to_json())
        return {**found, "usage": self._request.count(self._tally), **self._about}

    def _hear(self, item: Sampled) -> list[Any]:
        self._tally.n_reply += 1
        if item.token_id in self._end_ids:
            return []
        logprobs = None
        if item.logprob is not None:
            logprobs = [(finite(item.logprob), [(one, finite(score)) for one, score in item.top])]
        return self._parser.push(recipe.InferenceChunk.tokens([item.token_id], logprobs))

    def _finished(self, item: Ended, *, is_stopped: bool) -> list[Any]:
        reasons = recipe.InferenceFinishReason
        reason = reasons.Length if item.reason == "length" else reasons.Stop
        self._tally.reasons.append("stop" if is_stopped else item.reason)
        chunks = [] if is_stopped else self._parser.push(recipe.InferenceChunk.finish(reason))
        return [*chunks, *self._parser.finish()]

    def _written(self, chunks: Iterable[Any]) -> Iterable[tuple[str, dict[str, Any]]]:
        for chunk in chunks:
            name, event = self._reply.sse_event_name(chunk), json.loads(chunk.to_json())
            self._reply.accumulate(chunk)
            self._count(event)
            yield name, event

    def _count(self, event: dict[str, Any]) -> None:
        """Put the true counts and the seed where the event has counts."""
        for holder in (event, event.get("response")):
            if not isinstance(holder, dict) or not holder.get("usage"):
                continue
            details = holder["usage"].get("output_tokens_details") or {}
            self._tally.n_reasoning = details.get("reasoning_tokens", self._tally.n_reasoning)
            holder["usage"] = self._request.count(self._tally)
            holder |= self._about
