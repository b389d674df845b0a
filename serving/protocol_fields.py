"""The fields of requests: their descriptions, and how the ones about sampling become ``SamplingParams``."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any, Final

import attrs

from ..state.errors import RequestError
from ..state.sampling import SEED_LIMIT, TOP_LOGPROBS_LIMIT, SamplingParams, check_vocabulary, derive_seed
from .protocol import ApiError, Schema, bad_request

__all__ = [
    "CHAT",
    "COMPLETION",
    "DETOKENIZE",
    "MESSAGES",
    "RESPONSES",
    "TOKENIZE",
    "choice_params",
    "sampling_params",
    "stop_strings",
    "token_limit",
]

_COUNT: Final = {"type": "integer", "minimum": 0}
_TEXT: Final = {"type": "string"}
_FLAG: Final = {"type": "boolean"}
_OBJECT: Final = {"type": "object"}
_IDS: Final = {"type": "array", "items": _COUNT}

_SHARED: Final[Mapping[str, Schema]] = {
    "model": _TEXT,
    "stream": _FLAG,
    "stream_options": {
        "type": "object",
        "properties": {
            "include_usage": _FLAG,
            "keep_alive": {
                "type": "number",
                "minimum": 0.05,
                "maximum": 3600,
                "description": "Seconds of silence after which an SSE comment is sent.",
            },
        },
    },
    "n": {"type": "integer", "minimum": 1, "maximum": 128},
    "seed": {"type": "integer", "minimum": 0, "maximum": SEED_LIMIT - 1},
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1, "description": "0 and -1 keep all."},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "logit_bias": {"type": "object", "description": "Token id -> number from -100 to 100."},
    "stop": {
        "anyOf": [
            {"type": "string", "minLength": 1, "maxLength": 1024},
            {"type": "array", "maxItems": 16, "items": {"type": "string", "minLength": 1, "maxLength": 1024}},
        ]
    },
    "stop_token_ids": _IDS,
    "ignore_eos": _FLAG,
    "min_tokens": {**_COUNT, "description": "Stop tokens are held back until then; stop strings are not."},
    "return_token_ids": {**_FLAG, "description": "Report the ids of the prompt and of the reply."},
    "user": _TEXT,
}


def _parts(*kinds: str, **fields: Schema) -> Schema:
    """Describe a list of content parts; one of another kind, an image say, is refused instead of left out."""
    part = {"type": "object", "required": ["type"], "properties": {"type": {"enum": list(kinds)}, **fields}}
    return {"type": "array", "items": part}


_NO_CONSTRAINT: Final = {
    name: {"not": {}, "description": "Not supported; use response_format of /v1/chat/completions."}
    for name in (
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        *("regex", "ebnf", "json_schema", "grammar"),
    )
}
"""Constraints as other servers' clients ask for them: to ignore them would give replies that seem to obey."""

_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")

_NO_STATE: Final = {"not": {}, "description": "Not supported: nothing is kept of earlier replies."}

COMPLETION: Final[Schema] = {
    "type": "object",
    "required": ["model", "prompt"],
    "properties": {
        **_SHARED,
        "prompt": {
            "description": "A text, token ids, or a list of either.",
            "anyOf": [
                _TEXT,
                {"type": "array", "minItems": 1, "items": _TEXT},
                {"type": "array", "minItems": 1, "items": _COUNT},
                {"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 1, "items": _COUNT}},
            ],
        },
        "max_tokens": {**_COUNT, "description": "Default 16; 0 samples nothing, which with echo scores the prompt."},
        "echo": _FLAG,
        "logprobs": {"type": "integer", "minimum": 0, "maximum": TOP_LOGPROBS_LIMIT},
        "best_of": {"type": "integer", "minimum": 1, "description": "Only as many as n."},
        "suffix": {"type": "string", "maxLength": 0, "description": "Not supported."},
        "response_format": _NO_CONSTRAINT["guided_json"],
        **_NO_CONSTRAINT,
    },
}
"""Body of ``POST /v1/completions``."""

CHAT: Final[Schema] = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        **_SHARED,
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"enum": ["system", "developer", "user", "assistant", "tool", "latest_reminder"]},
                    "content": {"anyOf": [{"type": ["string", "null"]}, _parts("text")]},
                    "reasoning_content": {"type": ["string", "null"]},
                    "reasoning": {"type": ["string", "null"]},
                    "tool_calls": {"type": ["array", "null"], "items": _OBJECT},
                    "tool_call_id": {"type": ["string", "null"]},
                },
            },
        },
        "max_tokens": {"type": "integer", "minimum": 1},
        "max_completion_tokens": {"type": "integer", "minimum": 1},
        "logprobs": _FLAG,
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": TOP_LOGPROBS_LIMIT},
        "tools": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"enum": ["function"]},
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {
                            "name": _TEXT,
                            "description": {"type": ["string", "null"]},
                            "parameters": _OBJECT,
                            "strict": {"type": ["boolean", "null"]},
                        },
                    },
                },
            },
        },
        "tool_choice": {"anyOf": [{"type": "string", "enum": ["auto", "none", "required"]}, _OBJECT]},
        "parallel_tool_calls": _FLAG,
        "functions": {"type": "array", "maxItems": 0, "description": "Not supported; use tools."},
        "function_call": {"not": {}, "description": "Not supported; use tool_choice."},
        "modalities": {"type": "array", "items": {"enum": ["text"]}},
        "response_format": {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {
                    "enum": ["text", "json_object", "json_schema", "regex", "choice"],
                    "description": "With json_object the messages must say the word JSON, as OpenAI's service wants.",
                },
                "json_schema": _OBJECT,
                "regex": _TEXT,
                "choice": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 1024,
                    "items": {"type": "string", "minLength": 1},
                },
            },
        },
        "thinking": {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": ["enabled", "disabled", "adaptive"]}},
        },
        "reasoning_effort": {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max"]},
        "chat_template_kwargs": {"type": "object", "properties": {"thinking": _FLAG, "enable_thinking": _FLAG}},
        **_NO_CONSTRAINT,
    },
}
"""Body of ``POST /v1/chat/completions``."""

_SAMPLED: Final = {
    name: _SHARED[name]
    for name in (
        *("model", "stream", "seed", "temperature", "top_p", "top_k", "min_p", "frequency_penalty"),
        *("presence_penalty", "repetition_penalty", "logit_bias"),
    )
}

_NULL_OR_TEXT: Final = {"type": ["string", "null"]}
_RESPONSE_PARTS: Final = _parts("input_text", "output_text", "text", "refusal", "reasoning_text")

RESPONSES: Final[Schema] = {
    "type": "object",
    "required": ["model", "input"],
    "properties": {
        **_SAMPLED,
        "input": {
            "anyOf": [
                _TEXT,
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "object", "properties": {"content": {"anyOf": [_NULL_OR_TEXT, _RESPONSE_PARTS]}}},
                },
            ]
        },
        "instructions": _TEXT,
        "max_output_tokens": {"type": "integer", "minimum": 1},
        "include": {"type": "array", "items": _TEXT},
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": TOP_LOGPROBS_LIMIT},
        "tools": {"type": "array", "items": _OBJECT},
        "tool_choice": {"anyOf": [{"type": "string", "enum": ["auto", "none", "required"]}, _OBJECT]},
        "parallel_tool_calls": _FLAG,
        "reasoning": {"type": "object", "properties": {"effort": {"enum": [*_EFFORTS, None]}}},
        "text": _OBJECT,
        "background": {"enum": [False], "description": "Replies are not kept."},
        "previous_response_id": {**_TEXT, "maxLength": 0, "description": "Not supported: replies are not kept."},
        "user": _TEXT,
        "conversation": _NO_STATE,
        "prompt": _NO_STATE,
        **_NO_CONSTRAINT,
    },
}
"""Body of ``POST /v1/responses``."""

_JSON_SCHEMA: Final = {
    "type": "object",
    "required": ["type", "schema"],
    "properties": {"type": {"enum": ["json_schema"]}, "schema": _OBJECT},
}

MESSAGES: Final[Schema] = {
    "type": "object",
    "required": ["model", "messages", "max_tokens"],
    "properties": {
        **_SAMPLED,
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"enum": ["user", "assistant", "system"]},
                    "content": {
                        "anyOf": [
                            _TEXT,
                            _parts(
                                *("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
                                content={"anyOf": [_NULL_OR_TEXT, _parts("text")]},
                            ),
                        ]
                    },
                },
            },
        },
        "max_tokens": {"type": "integer", "minimum": 1},
        "system": {"anyOf": [_TEXT, _parts("text")]},
        "output_config": {"type": "object", "properties": {"effort": {"enum": [*_EFFORTS]}, "format": _JSON_SCHEMA}},
        "output_format": _JSON_SCHEMA,
        "stop_sequences": {
            "type": "array",
            "maxItems": 16,
            "items": {"type": "string", "minLength": 1, "maxLength": 1024},
        },
        "thinking": {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": ["enabled", "disabled", "adaptive"]}},
        },
        "tools": {"type": "array", "items": _OBJECT},
        "tool_choice": {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["auto", "any", "tool", "none"]},
                "name": _TEXT,
                "disable_parallel_tool_use": _FLAG,
            },
        },
        "metadata": {"type": "object", "properties": {"user_id": {"type": ["string", "null"]}}},
        "mcp_servers": {"type": "array", "maxItems": 0, "description": "Not supported."},
        "container": _NO_STATE,
        **_NO_CONSTRAINT,
    },
}
"""Body of ``POST /v1/messages``."""

TOKENIZE: Final[Schema] = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "prompt": _TEXT,
        "add_special_tokens": {**_FLAG, "description": "Put the token that begins a text first; default true."},
    },
}
"""Body of ``POST /tokenize``."""

DETOKENIZE: Final[Schema] = {"type": "object", "required": ["tokens"], "properties": {"tokens": _IDS}}
"""Body of ``POST /detokenize``."""

_RENAMED: Final = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Fields of ``SamplingParams`` that clients know by another name."""

_PASSED_ON: Final = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("stop_token_ids", "ignore_eos"),
)


def sampling_params(
    body: Mapping[str, Any], *, vocab_size: int, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """Read how to sample from a request.

    Args:
        body: the request, checked.
        vocab_size: V.
        max_tokens: tokens to sample at most, at least 1.
        logprobs: alternatives to report for each token.
    Returns:
        Parameters with a seed: the request's, or one drawn now.
    Raises:
        ApiError: a field that cannot be honoured, by the name that the client gave it.
    """
    try:
        params = SamplingParams(
            **{name: body[name] for name in _PASSED_ON if name in body},
            logit_bias=_logit_bias(body.get("logit_bias", {}), vocab_size),
            seed=body.get("seed", secrets.randbits(32)),
            max_new_tokens=max_tokens,
            min_new_tokens=body.get("min_tokens", 0),
            logprobs=logprobs,
        )
        check_vocabulary(params, vocab_size)
    except RequestError as error:
        field = _RENAMED.get(str(error.field), str(error.field))
        raise ApiError(
            f"{field}: expected {error.expected}, got {error.got!r}", param=field, code="invalid_value"
        ) from error
    return params


def choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    """Give every choice of a request a stream of its own; the first keeps the request's seed."""
    if choice == 0 or params.seed is None:
        return params
    return attrs.evolve(params, seed=derive_seed(params.seed, choice))


def stop_strings(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Read the strings that end a reply."""
    stop = body.get("stop", ())
    return (stop,) if isinstance(stop, str) else tuple(stop)


def token_limit(asked: int | None, default: int | None, *, n_prompt: int, context: int) -> int:
    """Find how many tokens may be sampled.

    Args:
        asked: by the request.
        default: where it asks for none; None for all there is room for.
        n_prompt: tokens of the prompt.
        context: tokens that a request may have in all.
    Raises:
        ApiError: there is no room for the prompt and a token, or not for what was asked.
    """
    room = context - n_prompt
    if room < 1 or (asked or 0) > room:
        wanted = "" if asked is None else f" and {asked} tokens of reply"
        bad_request(
            f"This model's maximum context length is {context} tokens, but the request has {n_prompt} tokens of "
            f"prompt{wanted}, and at least one token of reply must fit; shorten the prompt or ask for fewer tokens",
            "prompt" if asked is None or room < 1 else "max_tokens",
            "context_length_exceeded",
        )
    if asked is not None:
        return asked
    return room if default is None else min(room, default)


def _logit_bias(pairs: Mapping[str, Any], vocab_size: int) -> dict[int, float]:
    for key, bias in pairs.items():
        if not re.fullmatch(r"[0-9]{1,9}", key) or int(key) >= vocab_size:
            bad_request(
                f"logit_bias: expected token ids from 0 to {vocab_size - 1} as keys, got {key[:80]!r}",
                "logit_bias",
                "invalid_value",
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            bad_request(
                f"logit_bias: expected numbers from -100 to 100, got {str(bias)[:80]!r}", "logit_bias", "invalid_value"
            )
    return {int(key): bias for key, bias in pairs.items()}
