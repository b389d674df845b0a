"""``GET /openapi.json``: the description of the endpoints, made of the same tables that check requests."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

from .protocol import Schema
from .protocol_fields import CHAT, COMPLETION, DETOKENIZE, MESSAGES, RESPONSES, TOKENIZE
from .protocol_replies import ERROR, REPLIES

__all__ = ["describe"]

_BODIES: Final[Mapping[str, tuple[Schema, str]]] = {
    "/v1/completions": (COMPLETION, "Continue prompts, or score them."),
    "/v1/chat/completions": (CHAT, "Reply to a conversation, as OpenAI's clients ask."),
    "/v1/responses": (RESPONSES, "Reply to a conversation, as OpenAI's newer clients ask; nothing is kept."),
    "/v1/messages": (MESSAGES, "Reply to a conversation, as Anthropic's clients ask."),
    "/tokenize": (TOKENIZE, "Turn a text into token ids."),
    "/detokenize": (DETOKENIZE, "Turn token ids into a text."),
}

_PAGES: Final[Mapping[str, tuple[str, str]]] = {
    "/v1/models": ("application/json", "The model that is served, with its numeric choices."),
    "/v1/models/{name}": ("application/json", "The same by its name."),
    "/health": ("application/json", "200 while the engine gets on, 503 when it has work and does not."),
    "/ready": ("application/json", "200 while new requests are taken, else 503."),
    "/metrics": ("text/plain", "Counters, gauges and times in Prometheus's format."),
    "/openapi.json": ("application/json", "This description."),
    "/": ("text/html", "A page that shows what the server is doing."),
    "/live": ("text/event-stream", "What the page draws, twice a second."),
}

_ABOUT: Final = """Fields that are not described here are ignored; a field that is null counts as left out; a described
field of the wrong type or range is refused with 400 and its name. With "stream" replies come as server-sent events.
Every choice reports its "seed", and "system_fingerprint" names the model, whose numeric choices /v1/models has: both
together make the same reply again. Token counts include the token that ends a reply. Images and documents in messages
are refused. Settings that only steer a hosted service (service_tier, store, prompt_cache_key and the like) are among
the ignored fields. A client that closes its sending side has left: its request ends without a reply."""

_ERRORS: Final[Mapping[str, str]] = {
    "400": "Refused; the error names the field.",
    "401": "The API key is missing or another.",
    "404": "No such model or path.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "417": "An Expect that is not 100-continue.",
    "429": "Too many requests wait; Retry-After says when to ask again.",
    "431": "The headers are too large.",
    "500": "The engine failed; the log has more.",
    "503": "The server is shutting down, not ready, or stalled.",
}


def describe(*, model: str, has_key: bool) -> dict[str, Any]:
    """Describe the server in OpenAPI 3.1.

    Args:
        model: what requests call the model.
        has_key: whether requests need an API key.
    """
    paths: dict[str, Any] = {path: {"post": _posted(model, path, *found)} for path, found in _BODIES.items()}
    paths |= {path: {"get": _page(model, path, *found)} for path, found in _PAGES.items()}
    components: dict[str, Any] = {"schemas": {"Error": ERROR}}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "purestep", "version": version("purestep"), "description": " ".join(_ABOUT.split())},
        "paths": paths,
        "components": components,
    }
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _posted(model: str, path: str, body: Schema, summary: str) -> dict[str, Any]:
    needed, fields = body["required"], dict(body["properties"])
    if "model" in fields:
        fields["model"] = {"enum": [model]}
    fields = {name: one if name in needed or "not" in one else _or_null(one) for name, one in fields.items()}
    kinds = ("application/json", *(("text/event-stream",) if "stream" in fields else ()))
    return {
        "summary": summary,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {**body, "properties": fields}}},
        },
        "responses": {"200": _answer(path, *kinds), **_refusals()},
    }


def _or_null(field: Schema) -> Schema:
    return {"anyOf": [field, {"type": "null"}]}


def _page(model: str, path: str, kind: str, summary: str) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": summary, "responses": {"200": _answer(path, kind), **_refusals()}}
    if "{name}" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"enum": [model]}}]
    return found


def _answer(path: str, *kinds: str) -> dict[str, Any]:
    content: dict[str, Any] = {kind: {} for kind in kinds}
    if path in REPLIES:
        content["application/json"] = {"schema": REPLIES[path]}
    return {"description": "Done.", "content": content}


def _refusals() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": meaning, "content": content} for status, meaning in _ERRORS.items()}
