"""A *run*, what a sequence of steps captured, in order: checked, whoever put it together, and its rows found by token.

Source: none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Final

import attrs
import torch
from torch import Tensor

from ..model.stages import STAGES, split_name
from ..state.captured import Captured
from ..state.errors import RequestError, ShapeError

__all__ = [
    "IN_ORDER",
    "LOGITS",
    "IndexedRun",
    "Place",
    "RowKind",
    "Run",
    "Token",
    "checked_run",
    "row_kinds",
    "tensors_of",
]

Token = tuple[int, int, int]
"""(request, position, how often the run had fed it before)."""

Place = tuple[int, int]
"""(step, row)."""

Run = Iterable[Captured]
"""``out.captured`` of every step, in order."""

LOGITS: Final = "logits"
"""What the logits of a step are called beside its stages."""

IN_ORDER: Final = (*STAGES, LOGITS)
"""Names without layer, in the order in which a step computes them."""


@attrs.frozen
class RowKind:
    """What one row of a tensor is: two runs can be compared where it has the same shape in both.

    Attributes:
        shape: without the axis of tokens.
        dtype: of its numbers.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


def tensors_of(record: Captured) -> Mapping[str, Tensor]:
    """Return the stages of a step by full name, and its logits."""
    return {**record.stages, LOGITS: record.logits}


def checked_run(run: Run, field: str) -> tuple[Captured, ...]:
    """Check that a run is one, and that its parts fit each other.

    Args:
        run: any iterable of records.
        field: argument that it comes from, for messages.
    Returns:
        Its records.
    Raises:
        RequestError: no records, something else than records, or stages that no model has.
        ShapeError: a record whose parts have different lengths, or a stage that changes between steps.
    """
    records = () if isinstance(run, Captured) or not isinstance(run, Iterable) else tuple(run)
    if not records or not all(isinstance(record, Captured) for record in records):
        kinds = sorted({type(record).__name__ for record in records}) or [type(run).__name__]
        raise RequestError(
            f"{field}: expected what one or more steps captured, in order, got {', '.join(kinds)}; pass "
            "[out.captured, ...] of steps that were given capture=",
            field=field,
            expected="a sequence of Captured",
            got=kinds,
        )
    for step, record in enumerate(records):
        _check_record(record, f"{field}: step {step}", field)
    row_kinds(records, field)
    return records


def row_kinds(records: Iterable[Captured], field: str) -> Mapping[str, RowKind]:
    """Say what the rows of every tensor of a run are.

    Args:
        records: the run.
        field: argument that it comes from, for messages.
    Returns:
        Full stage name, or "logits" -> shape and dtype of a row.
    Raises:
        ShapeError: they are not the same in all steps.
    """
    kinds: dict[str, RowKind] = {}
    for step, record in enumerate(records):
        for name, x in tensors_of(record).items():
            kind = RowKind(tuple(x.shape[1:]), x.dtype)
            if kinds.setdefault(name, kind) != kind:
                raise ShapeError(
                    f"{field}: step {step}: {name}: expected rows as in the steps before, {kinds[name]}, got {kind}; a "
                    "run is of one model",
                    field=name,
                    expected=kinds[name],
                    got=kind,
                )
    return kinds


@attrs.frozen(eq=False, kw_only=True)
class IndexedRun:
    """A run whose rows can be found.

    Attributes:
        tokens: of every step, by row.
        tensors: of every step, by full stage name; logits among them.
        logit_lines: of every step, token row -> row of the logits.
        kinds: full stage name -> what its rows are.
    """

    tokens: tuple[tuple[Token, ...], ...]
    tensors: tuple[Mapping[str, Tensor], ...]
    logit_lines: tuple[Mapping[int, int], ...]
    kinds: Mapping[str, RowKind]

    @classmethod
    def of(cls, run: Run, field: str) -> IndexedRun:
        """Check a run and index it; as ``checked_run``."""
        records = checked_run(run, field)
        return cls(
            tokens=_tokens(records),
            tensors=tuple(tensors_of(record) for record in records),
            logit_lines=tuple({row: line for line, row in enumerate(record.logit_rows)} for record in records),
            kinds=row_kinds(records, field),
        )

    def token(self, place: Place) -> Token:
        """Name the token of a row of a step."""
        step, row = place
        return self.tokens[step][row]

    def line(self, name: str, place: Place) -> Place | None:
        """Find a token's row in a tensor; None where it has none."""
        step, row = place
        if name == LOGITS:
            row = self.logit_lines[step].get(row, -1)
        return (step, row) if name in self.tensors[step] and row >= 0 else None

    def gather(self, name: str, places: Sequence[Place]) -> Tensor:
        """Collect rows of one stage from any steps, in the order asked: float[X,...] on the host."""
        by_step: dict[int, list[int]] = {}
        for at, (step, _) in enumerate(places):
            by_step.setdefault(step, []).append(at)
        parts = [self.tensors[step][name][[places[at][1] for at in group]].cpu() for step, group in by_step.items()]
        order = torch.tensor([at for group in by_step.values() for at in group])
        return torch.cat(parts)[order.argsort()]

    def summary(self) -> str:
        """Say what the run holds, for messages."""
        tokens = [*chain(*self.tokens)]
        requests = ", ".join(map(str, dict.fromkeys(request for request, _, _ in tokens)))
        stages = ", ".join(sorted({split_name(name)[1] for name in self.kinds}, key=IN_ORDER.index))
        return f"{len(tokens)} tokens of requests {requests} with {stages}"


def _tokens(records: Iterable[Captured]) -> tuple[tuple[Token, ...], ...]:
    """Name the tokens of every step by row."""
    n_fed, steps = Counter[tuple[int, int]](), []
    for record in records:
        tokens = []
        for token in zip(record.request_ids, record.positions, strict=True):
            tokens.append((*token, n_fed[token]))
            n_fed[token] += 1
        steps.append(tuple(tokens))
    return tuple(steps)


def _check_record(record: Captured, where: str, field: str) -> None:
    for name in record.stages:
        layer, stage = split_name(name)
        if stage not in STAGES or STAGES[stage].is_in_layers is (layer is None):
            raise RequestError(
                f'{where}: expected stages by full name, such as "0.streams" or "final.streams", got {name!r}',
                field=field,
                expected=tuple(STAGES),
                got=name,
            )
    n_tokens = len(record.positions)
    lengths = [
        ("request_ids", [len(record.request_ids)], n_tokens),
        *((name, [*x.shape[:1]], n_tokens) for name, x in record.stages.items()),
        (LOGITS, [*record.logits.shape[:1]], len(record.logit_rows)),
    ]
    for name, got, expected in lengths:
        if got != [expected]:
            raise ShapeError(
                f"{where}: {name}: expected one row per token, {expected}, got {got}",
                field=name,
                expected=[expected],
                got=got,
            )
    if not all(0 <= row < n_tokens for row in record.logit_rows):
        raise ShapeError(
            f"{where}: logit_rows: expected numbers of token rows in [0, {n_tokens}), got {record.logit_rows}",
            field="logit_rows",
            expected=n_tokens,
            got=record.logit_rows,
        )
    if not all(type(number) is int for number in (*record.request_ids, *record.positions)):
        raise RequestError(
            f"{where}: expected request_ids and positions as plain integers, got other types; write x.tolist()",
            field=field,
        )
