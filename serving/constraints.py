"""What a reply may look like: grammars for JSON, patterns, choices and tool calls, and the masks that enforce them.

The grammars are llguidance's Lark dialect. Control tokens (the end of thinking, the marker of tool calls) appear in
them as token ids, so that their spellings in ordinary tokens stay text, as they do for the parser of replies.

Source: none; the markup of tool calls is the one that the prompt encoding of DeepSeek-V4 teaches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from math import ceil, lcm
from typing import Any, Final

import attrs
import llguidance
import torch
from tokenizers import Tokenizer
from torch import Tensor

from ..state.errors import RequestError
from .asks import Mask
from .protocol import bad_request
from .text import Vocabulary, read_vocabulary

__all__ = ["Grammars", "ToolSpec", "choice_rule", "json_rule", "regex_rule", "tools_rule"]

GRAMMAR_LIMIT: Final = 128 * 1024
"""Characters of a grammar. Larger ones take seconds to compile, and no schema written by a person comes near."""

DIVISOR_LIMIT: Final = 10_000
"""Least common multiple of a schema's ``multipleOf``, without powers of ten: grammars have a state per remainder."""

_WHITE_SPACE: Final = r"\x0A?\x20{0,8}"
"""Between the parts of JSON: a line break and its indentation, never without end."""

_LIMITS: Final = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
_NAME: Final = r"[^\"<>\\\x00-\x20]+"
"""Names that the markup can frame and the parser of replies can read: there are no escapes."""


@attrs.frozen(eq=False, kw_only=True)
class ToolSpec:
    """A tool as its grammar needs it.

    Attributes:
        name: of the function.
        parameters: JSON Schema of its arguments; empty for any arguments.
        is_strict: whether everything the schema says must be enforced.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False


class Grammars:
    """Compiles grammars against one model's vocabulary.

    Args:
        tokenizer: of the model.
        vocab_size: V.
        end_ids: ids that end a reply.
        end_of_thinking: id of the token that ends thinking.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int], end_of_thinking: int) -> None:
        vocabulary = read_vocabulary(tokenizer, vocab_size)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Spelled(vocabulary, end_ids)), n_vocab=vocab_size, eos_token=list(end_ids)
        )
        self._end_of_thinking = end_of_thinking
        self._n_words = ceil(vocab_size / 32)

    def compile(self, rules: str, *, thinking: bool, param: str) -> Callable[[], Mask]:
        """Compile a reply's grammar.

        Args:
            rules: define ``answer``.
            thinking: whether free thinking and its end come first.
            param: the field that asked for the grammar, for the complaint.
        Returns:
            A function that makes a fresh mask for one generation.
        Raises:
            ApiError: it is too large, does not compile, or allows nothing.
        """
        thought = f"THOUGHT <[{self._end_of_thinking}]> " if thinking else ""
        grammar = f"start: {thought}answer\nTHOUGHT: /(?s:.*)/\n{rules}\n"
        if len(grammar) > GRAMMAR_LIMIT:
            bad_request(
                f"{param}: expected a constraint of at most {GRAMMAR_LIMIT} characters, got {len(grammar)}",
                param,
                "unsupported_constraint",
            )
        matcher = llguidance.LLMatcher(
            self._tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0, limits=_LIMITS
        )
        # Some grammars compile although they allow nothing at all, which shows when the first mask is made, or although
        # they are too large, which shows at the next.
        probe = matcher
        for _ in range(2):
            if probe.is_error():
                break
            probe = matcher.deep_copy()
            probe.compute_bitmask()
        if not probe.is_error():
            return lambda: _Follower(matcher.deep_copy(), self._n_words)
        bad_request(f"{param}: this constraint cannot be enforced: {_reason(probe)}", param, "unsupported_constraint")


class _Spelled:
    """A vocabulary as llguidance reads it.

    Every added token is a control token to the grammars, so that none of them is a way to spell text. What a grammar
    forces is put into ordinary tokens whatever it spells; with the tokenizer as it is, the spelling of a control token
    would become that token, which no text allows.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, end_ids: Sequence[int]) -> None:
        added = json.loads(vocabulary.tokenizer.to_str())["added_tokens"]
        self.eos_token_id = end_ids[0]
        self.tokens = vocabulary.pieces
        self.special_token_ids = [one["id"] for one in added]
        self._plain = vocabulary.plain

    def __call__(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)


class _Follower:
    """The mask of one generation: follows its tokens through a copy of the grammar's matcher."""

    def __init__(self, matcher: llguidance.LLMatcher, n_words: int) -> None:
        self._matcher = matcher
        self._n_words = n_words
        self._n_seen = 0

    def __call__(self, outputs: tuple[int, ...]) -> Tensor:
        """Return i32[V/32], the ids that may follow ``outputs``."""
        if len(outputs) < self._n_seen:
            self._matcher.reset()
            self._n_seen = 0
        self._matcher.consume_tokens(list(outputs[self._n_seen :]))
        self._n_seen = len(outputs)
        bits = bytearray(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise RequestError(f"expected a constraint that can be followed, got: {_reason(self._matcher)}")
        # llguidance has room for one id more than the vocabulary.
        return torch.frombuffer(bits, dtype=torch.int32)[: self._n_words]


def _reason(matcher: llguidance.LLMatcher) -> str:
    return " ".join(matcher.get_error().split())[:200]


def json_rule(schema: Mapping[str, Any], *, param: str) -> str:
    """Write the rule of a reply that is JSON of a schema; an empty schema allows any JSON.

    Args:
        schema: the schema.
        param: the field that it came in, for the complaint.
    Raises:
        ApiError: it would take too long to compile.
    """
    return f"answer: {_json(schema, param=param)}"


def regex_rule(pattern: str) -> str:
    """Write the rule of a reply that matches a pattern as a whole."""
    # Escapes stay as they are; a bare slash would end the literal, and a bare line break the line.
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)
    return "answer: TEXT\nTEXT: /" + escaped.replace("\n", r"\n").replace("\r", r"\r") + "/"


def choice_rule(choices: Iterable[str]) -> str:
    """Write the rule of a reply that is one of several texts."""
    return "answer: " + " | ".join(map(_quoted, choices))


def tools_rule(tools: Sequence[ToolSpec], marker: int, *, is_forced: bool, is_single: bool) -> str:
    """Write the rules of a reply with tool calls.

    Args:
        tools: that may be called.
        marker: id of the token that marks the tags.
        is_forced: the reply is a call; else text that a call may follow.
        is_single: one call at most.
    Raises:
        ApiError: a name that the markup cannot frame.
    """
    tag = f"<[{marker}]>"
    head = rf'answer: "\n\n<" {tag} calls' if is_forced else rf"answer: TEXT | BEFORE_CALLS {tag} calls"
    more = "" if is_single else r' ("\n<" invoke)*'
    rules = [
        head,
        "TEXT: /(?s:.*)/",
        r"BEFORE_CALLS: /(?s:.*)\n\n</",
        r"RAW: /(?s:.*)<\//",
        # Of two tokens of the grammar that fit the lexer takes the longer, so that both have to go on to the bracket.
        rf'calls: "tool_calls>\n<" invoke{more} "\n</" {tag} "tool_calls>"',
        "invoke: " + " | ".join(f"tool{at}" for at in range(len(tools))),
    ]
    for at, tool in enumerate(tools):
        body = _arguments(tool, tag)
        opening = _quoted(f'invoke name="{_framed(tool.name)}">\n')
        rules.append(f'tool{at}: {tag} {opening} {body} "</" {tag} "invoke>"')
    return "\n".join(rules)


def _arguments(tool: ToolSpec, tag: str) -> str:
    """Write a tool's arguments: its properties in order, or anything where it names none."""
    schema = tool.parameters
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        if schema.get("additionalProperties") is False or (isinstance(properties, Mapping) and tool.is_strict):
            return '""'
        text = rf'"parameter name=\"" /{_NAME}/ "\" string=\"true\">" RAW'
        other = rf'"parameter name=\"" /{_NAME}/ "\" string=\"false\">" {_json({}, lenient=True)} "</"'
        return rf'("<" {tag} (({text}) | ({other})) {tag} "parameter>\n")*'
    required = schema.get("required")
    needed = set(required) if isinstance(required, list) and all(isinstance(one, str) for one in required) else set()
    return " ".join(
        _argument(tool, name, inner, tag) + ("" if name in needed else "?") for name, inner in properties.items()
    )


def _argument(tool: ToolSpec, name: str, schema: Any, tag: str) -> str:
    schema = {} if schema is True else schema
    if not isinstance(schema, Mapping):
        bad_request(f"tools: {tool.name}.{name}: expected a JSON Schema", "tools", "invalid_value")
    is_text = schema.get("type") == "string"
    _refuse_rings(schema, tool.parameters, "tools")
    opening = _quoted(f'parameter name="{_framed(name)}" string="{"true" if is_text else "false"}">')
    if not is_text:
        _refuse_foreign_references(schema, tool, name)
        shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        value = f'{_json({**shared, **schema}, lenient=not tool.is_strict)} "</"'
    elif _is_texts(schema.get("enum")):
        value = "(" + " | ".join(_quoted(one + "</") for one in schema["enum"]) + ")"
    else:
        unenforced = sorted({"pattern", "format", "minLength", "maxLength"} & schema.keys())
        if tool.is_strict and unenforced:
            bad_request(
                f"tools: {tool.name}.{name}: {unenforced[0]} cannot be enforced in a strict tool; leave it out",
                "tools",
                "unsupported_constraint",
            )
        value = "RAW"
    return rf'("<" {tag} {opening} {value} {tag} "parameter>\n")'


def _refuse_foreign_references(schema: Any, tool: ToolSpec, name: str) -> None:
    """Refuse references to what does not come along with an argument: only definitions do."""
    for key, inner in schema.items() if isinstance(schema, Mapping) else enumerate(schema):
        if isinstance(inner, Mapping | list):
            _refuse_foreign_references(inner, tool, name)
        if key == "$ref" and isinstance(inner, str) and not inner.startswith(("#/$defs/", "#/definitions/")):
            bad_request(
                f"tools: {tool.name}.{name}: expected references into $defs or definitions, got {inner[:80]!r}",
                "tools",
                "unsupported_constraint",
            )


def _framed(name: str) -> str:
    if not re.fullmatch(_NAME, name) or "｜DSML｜" in name:
        bad_request(
            f"tools: expected names without quotes, angle brackets, backslashes and white space, got {name[:80]!r}",
            "tools",
            "unsupported_constraint",
        )
    return name


def _is_texts(found: Any) -> bool:
    return isinstance(found, list) and bool(found) and all(isinstance(one, str) for one in found)


def _refuse_rings(schema: Any, root: Mapping[str, Any], param: str) -> None:
    """Refuse references that lead to themselves and nowhere else: a call could begin that has no end."""
    for inner in schema.values() if isinstance(schema, Mapping) else schema:
        if isinstance(inner, Mapping | list):
            _refuse_rings(inner, root, param)
    seen, found = set(), schema
    while isinstance(found, Mapping) and isinstance(reference := found.get("$ref"), str):
        if reference in seen:
            bad_request(
                f"{param}: $ref: expected a schema, got {reference[:80]!r}, which leads to itself",
                param,
                "unsupported_constraint",
            )
        seen.add(reference)
        found = _referred(root, reference)


def _referred(root: Mapping[str, Any], reference: str) -> Any:
    """Follow a reference within a document; None where it leads elsewhere."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _json(schema: Mapping[str, Any], *, lenient: bool = False, param: str = "tools") -> str:
    """Write a JSON value of a schema; leniently, keywords that cannot be enforced are left out."""
    if lcm(*_divisors(schema)) > DIVISOR_LIMIT:
        bad_request(
            f"{param}: expected no multipleOf beyond {DIVISOR_LIMIT}, all of them together; leave it out",
            param,
            "unsupported_constraint",
        )
    options = {"whitespace_pattern": _WHITE_SPACE, "lenient": lenient}
    return "%json " + json.dumps({**_without_notes(schema), "x-guidance": options})


def _without_notes(schema: Any) -> Any:
    """Leave out what a schema says to its readers alone."""
    if isinstance(schema, list):
        return [_without_notes(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {
        key: inner
        for key, inner in schema.items()
        if not (key in ("description", "title", "$comment") and isinstance(inner, str))
    }
    return {key: inner if key in ("const", "enum") else _without_notes(inner) for key, inner in kept.items()}


def _divisors(schema: Any) -> Iterator[int]:
    """Yield the digits of every ``multipleOf`` in a schema, without the zeros that cost a grammar nothing."""
    if isinstance(schema, Mapping):
        divisor = schema.get("multipleOf")
        if isinstance(divisor, int | float) and not isinstance(divisor, bool):
            digits = "".join(map(str, Decimal(str(divisor)).as_tuple().digits))
            yield int(digits.strip("0") or 1)
        for inner in schema.values():
            yield from _divisors(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _divisors(inner)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
