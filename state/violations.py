"""What a predicate finds, and the running of tables of predicates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import attrs

from .errors import RequestError

__all__ = ["Found", "Violation", "collect", "listed"]

Found: TypeAlias = Iterator[tuple[str, str]]
"""Pairs of (where, what is wrong); nothing when the invariant holds."""


@attrs.frozen
class Violation:
    """One broken promise.

    Attributes:
        id: of the invariant.
        text: what was expected and what was found.
        where: the request, pool or buffer.
    """

    id: str
    text: str
    where: str

    def __str__(self) -> str:
        return f"{self.id} {self.where}: {self.text}"


def collect(
    predicates: Mapping[str, Callable[..., Found]], ids: Iterable[str] | None, *facts: object
) -> tuple[Violation, ...]:
    """Run predicates on the same facts.

    Args:
        predicates: by id.
        ids: which ones; None for all.
        facts: what each of them takes.
    Returns:
        Everything found, in the order of the table.
    Raises:
        RequestError: an id that is not in the table.
    """
    chosen = tuple(predicates) if ids is None else tuple(ids)
    for unknown in (id_ for id_ in chosen if id_ not in predicates):
        raise RequestError(
            f"invariants: expected ids among {', '.join(predicates)}, got {unknown!r}",
            field="ids",
            expected=tuple(predicates),
            got=unknown,
        )
    return tuple(Violation(id=id_, text=text, where=where) for id_ in chosen for where, text in predicates[id_](*facts))


def listed(values: Iterable[object], limit: int = 6) -> str:
    """Spell out the first few values of an array or sequence for a message."""
    found = [str(value) for value in values]
    return ", ".join(found[:limit]) + (f", ... ({len(found)} in all)" if len(found) > limit else "")
