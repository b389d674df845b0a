"""The recorded schemas of the Ascend operators, and how two schema texts are compared.

``schemas.json`` holds them as data, each with its provider, chips, mutated arguments and public source; a torch-npu
operator that changed between releases has one record per form.

Source: named in ``schemas.json``, per record.
"""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import attrs
import torch

__all__ = ["RecordedSchema", "load_schemas", "parse_text", "same_contract"]

# How torch prints a write annotation that has no letter; its own parser refuses that form.
_UNNAMED_WRITE = re.compile(r"\(\$\d+! -> \)")


@attrs.frozen(eq=False, kw_only=True)
class RecordedSchema:
    """One operator of one provider.

    Attributes:
        provider: package that registers it.
        namespace: of ``torch.ops``.
        name: of the operator.
        overload: "default" or a name.
        text: the schema.
        chips: "a2", "a3", "a5".
        mutates: arguments that it writes.
        releases: releases of the provider with this form; empty where only one form is known.
        source: where the schema was read.
        unusable: why purestep must not call it, or None.
    """

    provider: str
    namespace: str
    name: str
    overload: str
    text: str
    chips: tuple[str, ...]
    mutates: tuple[str, ...]
    releases: tuple[str, ...]
    source: str
    unusable: str | None

    @property
    def qualified_name(self) -> str:
        """The name as in ``namespace::name``, with ``.overload`` unless it is the default one."""
        return f"{self.namespace}::{self.name}" + ("" if self.overload == "default" else f".{self.overload}")


def load_schemas() -> tuple[RecordedSchema, ...]:
    """Read every recorded schema, in the order of the file."""
    data = json.loads(resources.files(__package__).joinpath("schemas.json").read_text("utf-8"))
    return tuple(_record(entry, data["sources"]) for entry in data["schemas"])


def _record(entry: dict[str, Any], sources: dict[str, str]) -> RecordedSchema:
    namespace, rest = entry["schema"].split("::", 1)
    name, _, overload = rest.split("(", 1)[0].partition(".")
    return RecordedSchema(
        provider=entry["provider"],
        namespace=namespace,
        name=name,
        overload=overload or "default",
        text=entry["schema"],
        chips=tuple(entry["chips"]),
        mutates=tuple(entry["mutates"]),
        releases=tuple(entry.get("releases", ())),
        source=sources[entry["source"]],
        unusable=entry.get("unusable"),
    )


def parse_text(text: str) -> torch._C.FunctionSchema:
    """Parse a schema, recorded or printed by torch."""
    return torch._C.parse_schema(_UNNAMED_WRITE.sub("!", text))


def same_contract(a: str, b: str) -> bool:
    """Tell whether two schema texts promise the same call.

    Compared are the operator's name and, for every argument, name, type, default, keyword-only and what is written;
    of the results, type and aliasing. Names of results and letters of aliases say nothing to a caller. The first
    argument of an operator may be called ``self`` or ``input``: it is always passed by position.
    """
    return _contract(a) == _contract(b)


def _contract(text: str) -> tuple[Any, ...]:
    schema = parse_text(text)
    arguments = tuple(
        (
            "input" if place == 0 and argument.name == "self" else argument.name,
            str(argument.real_type),
            getattr(argument, "N", None),  # the length of int[2]; the stubs do not know it
            argument.has_default_value(),
            argument.default_value if argument.has_default_value() else None,
            argument.kwarg_only,
            _alias(argument),
        )
        for place, argument in enumerate(schema.arguments)
    )
    returns = tuple((str(result.real_type), _alias(result)) for result in schema.returns)
    return schema.name, schema.overload_name, arguments, returns


def _alias(argument: torch._C.Argument) -> bool | None:
    return argument.alias_info.is_write if argument.alias_info else None
