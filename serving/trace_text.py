"""A traced step as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from rich.markup import escape
from rich.table import Table

from ..step.trace_values import (
    NO_PART,
    NOT_HERE,
    ONE_RANK,
    UNCHANGED,
    Access,
    Choice,
    Trace,
    TraceRequest,
    TraceStage,
)
from .info import show_layers

__all__ = ["TokenText", "batch_table", "pool_table", "request_name", "stage_table"]

TokenText = Callable[[int], str]
"""What a token id says."""

_SILENT: Final = frozenset({UNCHANGED, ONE_RANK, NOT_HERE, NO_PART})
"""Answers that say that nothing happens."""

_TABLES: Final[Mapping[str, str]] = {"page_refs": "refs", "swa_refs": "window refs", "c128_refs": "C128 refs"}
_SHOWN: Final = 4
"""Stretches of slots that are written out before the rest is counted."""


def request_name(request_id: int) -> str:
    """Name a request as the article does: A, B, C, and after Z by its number."""
    return chr(ord("A") + request_id) if request_id < 26 else f"#{request_id}"


def batch_table(trace: Trace, number: int, token_text: TokenText) -> Table:
    """Show which requests run, where their tokens stand, where they are written and what is sampled.

    Args:
        trace: of the step.
        number: of the step.
        token_text: what a token says.
    """
    title = f"Step {number}: {trace.axes['T']} tokens of {trace.axes['B']} requests, pages of {trace.page_size}"
    table = Table(title=title, title_justify="left")
    for column in ("", "row", "fed", "position", "length", "slot", "found as", "window", "C4", "C128", "sampled"):
        table.add_column(column, overflow="fold")
    for request in trace.running:
        table.add_row(
            request_name(request.request_id),
            str(request.row),
            _tokens(request.input_ids, token_text),
            show_layers(request.positions),
            f"{request.len_before} -> {request.len_after}",
            show_layers(request.out_full_loc),
            _rules(request),
            show_layers(request.out_swa_loc),
            show_layers(request.out_c4_loc) or "-",
            show_layers(request.out_c128_loc) or "-",
            "-" if request.sampled is None else _tokens((request.sampled,), token_text),
        )
    return table


def pool_table(trace: Trace) -> Table:
    """Show what the step does to the free lists."""
    table = Table(title="Free pages", title_justify="left")
    for column in ("pool", "free", "taken", "given back", "next"):
        table.add_column(column)
    for pool in trace.pools:
        table.add_row(
            pool.name,
            f"{pool.n_free_before} -> {pool.n_free_after}",
            show_layers(pool.taken) or "-",
            show_layers(pool.given) or "-",
            show_layers(pool.next_after) + (", ..." if pool.n_free_after > len(pool.next_after) else ""),
        )
    return table


def stage_table(trace: Trace) -> Table:
    """Show every stage of the step: shapes, reads, writes, and whatever else happens in it."""
    table = Table(title="Stages (slots by request)", title_justify="left")
    for column in ("stage", "tensor"):
        table.add_column(column, no_wrap=True)
    for column in ("reads", "writes", "besides"):
        table.add_column(column, overflow="fold")
    for at, stage in enumerate(trace.stages):
        following = trace.stages[at + 1 : at + 2]
        table.add_row(
            stage.name,
            escape(_shapes(stage)),
            _accesses(stage.reads),
            _accesses(stage.writes),
            "\n".join(map(escape, _besides(stage))),
            end_section=any(other.layer != stage.layer for other in following),
        )
    return table


def _tokens(ids: Iterable[int], token_text: TokenText) -> str:
    return escape(", ".join(f"{token} {token_text(token)!r}" for token in ids))


def _shapes(stage: TraceStage) -> str:
    """Write the letters of every shape, and the numbers below."""
    letters = (shape.token[shape.token.index("[") :] for shape in stage.shapes)
    numbers = ("x".join(map(str, shape.sizes)) for shape in stage.shapes)
    return f"{' > '.join(letters)}\n{' > '.join(numbers)}"


def _rules(request: TraceRequest) -> str:
    return ", ".join(dict.fromkeys(request.slot_rules))


def _accesses(accesses: Iterable[Access]) -> str:
    """Write one line per store: the slots of every request."""
    lines: dict[str, list[str]] = {}
    for one in accesses:
        shown = f"{request_name(one.request_id)} {_slots(one)}"
        lines.setdefault(_TABLES.get(one.store, one.store), []).append(shown)
    return "\n".join(f"{store}: {', '.join(found)}" for store, found in lines.items()) or "-"


def _slots(one: Access) -> str:
    if len(one.values) == 1:
        return f"{one.slots[0]}={one.values[0]}"
    stretches = show_layers(sorted(set(one.slots))).split(", ")
    if len(stretches) <= _SHOWN:
        return ", ".join(stretches)
    return f"{', '.join(stretches[:_SHOWN])}, ... ({len(one.slots)} in all)"


def _besides(stage: TraceStage) -> Iterator[str]:
    for answer in (stage.ownership, stage.shards, stage.vocabulary, stage.next_input):
        if answer not in _SILENT:
            yield answer
    for choice in stage.choices:
        yield f"{request_name(choice.request_id)} at {choice.position}: {_choice(choice)}"
    for one in stage.experts:
        yield f"{' '.join(request_name(stage.request_ids[row]) for row in one.rows)} -> expert {one.expert_id}"


def _choice(choice: Choice) -> str:
    if not choice.weights:
        return f"entries {show_layers(choice.ids) or 'none'} of {choice.n_candidates}"
    pairs = zip(choice.ids, choice.weights, strict=True)
    return "experts " + ", ".join(f"{expert} ({weight:.2f})" for expert, weight in pairs)
