"""What replies look like, by path: the descriptions that ``/openapi.json`` has and that tests hold replies to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .protocol import Schema

__all__ = ["ERROR", "REPLIES"]

_TEXT: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_IDS: Final = {"type": "array", "items": _COUNT}


def _object(needed: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Describe an object by the fields that it always has and those that it may have."""
    return {"type": "object", "required": [*needed], "properties": {**needed, **more}}


def _list(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _or_null(kind: str) -> dict[str, Any]:
    return {"type": [kind, "null"]}


ERROR: Final[Schema] = _object(
    {"error": _object({"message": _TEXT, "type": _TEXT}, param=_or_null("string"), code=_or_null("string"))}
)
"""Every refusal."""

_USAGE: Final = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
    },
    completion_tokens_details=_object({"reasoning_tokens": _COUNT}),
)

_EVENT_USAGE: Final = _object({"input_tokens": _COUNT, "output_tokens": _COUNT})

_CALL: Final = _object(
    {"id": _TEXT, "type": {"enum": ["function"]}, "function": _object({"name": _TEXT, "arguments": _TEXT})}
)

_CARD: Final = _object(
    {
        "id": _TEXT,
        "object": {"enum": ["model"]},
        "created": _COUNT,
        "owned_by": _TEXT,
        "max_model_len": _COUNT,
        "system_fingerprint": _TEXT,
        "dtype": _TEXT,
        "kernels": _TEXT,
        "numerics": {"type": "object"},
    }
)


def _with_choices(kind: str, said: Mapping[str, Any], reasons: list[str]) -> dict[str, Any]:
    choice = _object(
        {
            "index": _COUNT,
            **said,
            "logprobs": _or_null("object"),
            "finish_reason": {"enum": reasons},
            "seed": _COUNT,
        },
        token_ids=_IDS,
        prompt_token_ids=_IDS,
    )
    return _object(
        {
            "id": _TEXT,
            "object": {"enum": [kind]},
            "created": _COUNT,
            "model": _TEXT,
            "system_fingerprint": _TEXT,
            "choices": _list(choice),
            "usage": _USAGE,
        }
    )


REPLIES: Final[Mapping[str, Schema]] = {
    "/v1/completions": _with_choices("text_completion", {"text": _TEXT}, ["stop", "length"]),
    "/v1/chat/completions": _with_choices(
        "chat.completion",
        {
            "message": _object(
                {"role": {"enum": ["assistant"]}, "content": _or_null("string")},
                reasoning_content=_TEXT,
                tool_calls=_list(_CALL),
            )
        },
        ["stop", "length", "tool_calls"],
    ),
    "/v1/responses": _object(
        {
            "id": _TEXT,
            "object": {"enum": ["response"]},
            "created_at": _COUNT,
            "model": _TEXT,
            "status": {"enum": ["completed", "incomplete"]},
            "output": _list(_object({"type": _TEXT})),
            "usage": _EVENT_USAGE,
            "system_fingerprint": _TEXT,
            "seed": _COUNT,
        }
    ),
    "/v1/messages": _object(
        {
            "id": _TEXT,
            "type": {"enum": ["message"]},
            "role": {"enum": ["assistant"]},
            "model": _TEXT,
            "content": _list(_object({"type": _TEXT})),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": _or_null("string"),
            "usage": _EVENT_USAGE,
            "system_fingerprint": _TEXT,
            "seed": _COUNT,
        }
    ),
    "/tokenize": _object({"tokens": _IDS, "count": _COUNT, "max_model_len": _COUNT}),
    "/detokenize": _object({"prompt": _TEXT}),
    "/v1/models": _object({"object": {"enum": ["list"]}, "data": _list(_CARD)}),
    "/v1/models/{name}": _CARD,
    "/health": _object({"status": {"enum": ["ok"]}, "seconds_since_progress": _or_null("number")}),
    "/ready": _object({"status": {"enum": ["ready"]}}),
    "/openapi.json": _object({"openapi": _TEXT, "info": {"type": "object"}, "paths": {"type": "object"}}),
}
"""Replies that are JSON and no stream."""
