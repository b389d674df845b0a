"""What goes over the wire whatever the endpoint: errors, bodies, and the check of a body against its description.

Bodies are described by a small part of JSON Schema, so that one description checks requests and documents them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from ..state.errors import PurestepError

__all__ = ["ApiError", "Schema", "bad_request", "check_body", "error_body", "is_unicode", "parse_body", "without_nulls"]

Schema = Mapping[str, Any]
"""A description of a value: ``type``, ``enum``, ``anyOf``, limits, ``items``, ``properties``, ``required``;
``not`` with a ``description`` is a field that is known and not supported."""

REFERENCE_LIMIT: Final = 256
"""References of all schemas of a request. Chains of about 700 overflow the stacks of libraries that follow them."""

NESTING_LIMIT: Final = 100
"""Levels of lists and objects in a body; far above what any request needs, below what parsers can recurse."""


class ApiError(PurestepError):
    """A request that is answered with an error.

    Args:
        message: what is wrong and what to do.
        status: of the response.
        param: the field that is wrong.
        code: a word that programs look at.
        retry_after: seconds after which asking again makes sense.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message, field=param)
        self.status = status
        self.code = code
        self.retry_after = retry_after


def bad_request(message: str, param: str | None, code: str | None = None) -> NoReturn:
    """Refuse a request, naming the field that is wrong."""
    raise ApiError(message, param=param, code=code)


def error_body(error: ApiError) -> dict[str, Any]:
    """Write an error in the shape that OpenAI's clients read."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = "server_error" if error.status >= 500 else kinds.get(error.status, "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": error.code}}


def parse_body(raw: bytes) -> dict[str, Any]:
    """Read a JSON object, whatever its sender tries.

    Raises:
        ApiError: it is not strict JSON in UTF-8, not an object, or nested deeper than any request needs.
    """
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        bad_request("body: expected JSON in UTF-8, got other bytes", None, "invalid_json")
    except RecursionError:
        _refuse_nesting()
    except ValueError as error:
        bad_request(f"body: expected a JSON object, got something that is not JSON: {error}", None, "invalid_json")
    if not isinstance(body, dict):
        bad_request(f"body: expected a JSON object, got {_kind(body)}", None, "invalid_json")
    _check_leaves(body)
    return body


def without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the fields that a client sent as null: they mean that nothing was asked for."""
    return {name: found for name, found in body.items() if found is not None}


def check_body(schema: Schema, body: Any, path: str = "") -> None:
    """Compare a value with its description; fields that the description does not name are ignored.

    Args:
        schema: the description.
        body: the value.
        path: where it stands in the request.
    Raises:
        ApiError: the first difference, by the name of its field.
    """
    if "not" in schema:
        bad_request(f"{path}: {schema['description']}", path, "unsupported_parameter")
    if "anyOf" in schema:
        _check_any(schema["anyOf"], body, path)
        return
    kinds = schema.get("type", ())
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if kinds and not any(_IS[kind](body) for kind in kinds):
        _refuse(path, " or ".join(kinds), body, "invalid_type")
    # To Python 0 and False are equal, to JSON they are not.
    if "enum" in schema and not any(type(one) is type(body) and one == body for one in schema["enum"]):
        _refuse(path, "one of " + ", ".join(map(repr, schema["enum"])), body)
    for keyword, (fits, words) in _LIMITS.items():
        if keyword in schema and _is_measurable(keyword, body) and not fits(body, schema[keyword]):
            _refuse(path, words.format(schema[keyword]), body)
    if isinstance(body, list) and "items" in schema:
        for at, item in enumerate(body):
            check_body(schema["items"], item, f"{path}[{at}]")
    if isinstance(body, dict):
        _check_fields(schema, body, path)


def _check_fields(schema: Schema, body: Mapping[str, Any], path: str) -> None:
    for name in schema.get("required", ()):
        if name not in body:
            where = f"{path}.{name}" if path else name
            bad_request(f"{where}: expected this field, got none", where, "missing_required_parameter")
    for name, inner in schema.get("properties", {}).items():
        if name in body:
            check_body(inner, body[name], f"{path}.{name}" if path else name)


def _check_any(choices: Sequence[Schema], body: Any, path: str) -> None:
    """Check against the choice that is meant: the one whose types fit, and the deepest error there."""
    found: list[ApiError] = []
    for choice in choices:
        try:
            check_body(choice, body, path)
        except ApiError as error:
            found.append(error)
        else:
            return
    raise max(found, key=lambda error: (error.code != "invalid_type", len(error.field or "")))


def _is_integer(found: Any) -> bool:
    # A bool is an int to Python, and 3.0 an integer to JSON Schema; clients that mean a count send 3.
    return isinstance(found, int) and not isinstance(found, bool)


_IS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "null": lambda found: found is None,
    "boolean": lambda found: isinstance(found, bool),
    "integer": _is_integer,
    "number": lambda found: _is_integer(found) or isinstance(found, float),
    "string": lambda found: isinstance(found, str),
    "array": lambda found: isinstance(found, list),
    "object": lambda found: isinstance(found, dict),
}

_LIMITS: Final[Mapping[str, tuple[Callable[[Any, Any], bool], str]]] = {
    "minimum": (lambda found, limit: found >= limit, "at least {}"),
    "maximum": (lambda found, limit: found <= limit, "at most {}"),
    "exclusiveMinimum": (lambda found, limit: found > limit, "more than {}"),
    "minItems": (lambda found, limit: len(found) >= limit, "at least {} items"),
    "maxItems": (lambda found, limit: len(found) <= limit, "at most {} items"),
    "minLength": (lambda found, limit: len(found) >= limit, "at least {} characters"),
    "maxLength": (lambda found, limit: len(found) <= limit, "at most {} characters"),
}


def _is_measurable(keyword: str, found: Any) -> bool:
    if keyword.endswith("Items"):
        return isinstance(found, list)
    return isinstance(found, str) if keyword.endswith("Length") else _IS["number"](found)


def _refuse(path: str, expected: str, got: Any, code: str = "invalid_value") -> NoReturn:
    shown = repr(got) if isinstance(got, str | int | float | None) else _kind(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    bad_request(f"{path}: expected {expected}, got {shown}", path, code)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _refuse_nesting() -> NoReturn:
    bad_request(f"body: expected at most {NESTING_LIMIT} levels of lists and objects, got more", None, "too_deep")


def _kind(found: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(found), "a number")


def _check_leaves(body: Any) -> None:
    """Refuse what JSON allows and later code does not bear: nesting, references, half characters, infinite numbers."""
    level, depth, n_references = [body], 0, 0
    while level:
        depth += 1
        n_references += sum("$ref" in one for one in level if isinstance(one, dict))
        if n_references > REFERENCE_LIMIT:
            bad_request(
                f"body: expected at most {REFERENCE_LIMIT} references ($ref) in schemas, got more",
                None,
                "unsupported_constraint",
            )
        if depth > NESTING_LIMIT:
            _refuse_nesting()
        leaves = [leaf for one in level for leaf in (_inner(one))]
        for leaf in leaves:
            if isinstance(leaf, float) and not math.isfinite(leaf):
                bad_request("body: expected finite numbers, got one beyond float64", None, "invalid_json")
            if isinstance(leaf, str) and not is_unicode(leaf):
                bad_request("body: expected text, got half of a surrogate pair", None, "invalid_json")
        level = [leaf for leaf in leaves if isinstance(leaf, dict | list)]


def _inner(one: Any) -> list[Any]:
    return [*one.keys(), *one.values()] if isinstance(one, dict) else one


def is_unicode(text: str) -> bool:
    """Tell whether a text has no half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
