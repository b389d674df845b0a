"""Invariants of the decode path as predicates that return what is violated, for tests of this engine or another one.

=================== ===================================== ===========================================================
table               facts                                 what it is about
=================== ===================================== ===========================================================
``STATE``           (ledger)                              any state, at any time
``PREPARED``        (before, batch, after)                ``prepare_decode`` and ``prepare_extend``
``VIEW``            (prepared, batch, view)               ``forward_batch``
``COMMITTED``       (prepared, out, after)                forward, sampling, relay, commit
``CLOSED``          (before, after)                       ``close_request``
``FORKED``          (before, after, parent id, fork id)   ``fork_request``
=================== ===================================== ===========================================================

Each table maps ids to predicates, which take ``Ledger`` values (``read_ledger(state)``) and yield (where, what is
wrong); the ``check`` functions below run a table, or some of its ids, on states. Ids are those of the decode-path
sheet, section 9, as far as one process has them. Differences: there is no prefix tree, but forks share whole pages with
refcounts, so "named by one live request" became "the page being written has refcount 1 and is named by its writer
only". Ids that begin with N have no counterpart there: sharing, records, forks.

Checks read whole tables on the host. They are for tests and debugging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from .batch import ForwardBatch, ScheduleBatch, StepOutput
from .decode import DecodeState
from .invariants_allocated import ALLOCATED
from .invariants_committed import CLOSED as CLOSED
from .invariants_committed import COMMITTED as COMMITTED
from .invariants_committed import FORKED as FORKED
from .invariants_compressed import COMPRESSED
from .invariants_pages import PAGES
from .invariants_prepared import LENGTHS
from .invariants_requests import REQUESTS
from .invariants_view import VIEW as VIEW
from .invariants_window import WINDOW
from .ledger import Holding as Holding
from .ledger import Ledger as Ledger
from .ledger import digest as digest
from .ledger import read_ledger as read_ledger
from .violations import Found as Found
from .violations import Violation as Violation
from .violations import collect

__all__ = [
    "CLOSED",
    "COMMITTED",
    "FORKED",
    "PREPARED",
    "STATE",
    "VIEW",
    "Found",
    "Holding",
    "Ledger",
    "Violation",
    "check",
    "check_closed",
    "check_committed",
    "check_forked",
    "check_prepared",
    "check_view",
    "digest",
    "read_ledger",
]

STATE: Final[Mapping[str, Callable[[Ledger], Found]]] = {**REQUESTS, **PAGES, **WINDOW, **COMPRESSED}
"""Predicates over one state, by id."""

PREPARED: Final[Mapping[str, Callable[[Ledger, ScheduleBatch, Ledger], Found]]] = {**LENGTHS, **ALLOCATED}
"""Predicates over (before, batch, after), by id."""


def check(state: DecodeState, ids: Iterable[str] | None = None) -> tuple[Violation, ...]:
    """Find what is wrong with a state.

    Args:
        state: at any time; some promises hold only while no step is launched and are then not looked at.
        ids: of ``STATE``; default all.
    Returns:
        Violations; empty for a sound state.
    """
    return collect(STATE, ids, read_ledger(state))


def check_prepared(
    before: DecodeState, batch: ScheduleBatch, after: DecodeState, ids: Iterable[str] | None = None
) -> tuple[Violation, ...]:
    """Find what is wrong with the preparation of a step.

    Args:
        before: the state given.
        batch: the batch returned.
        after: the state returned.
        ids: of ``PREPARED``; default all.
    """
    return collect(PREPARED, ids, read_ledger(before), batch, read_ledger(after))


def check_view(
    prepared: DecodeState, batch: ScheduleBatch, view: ForwardBatch, ids: Iterable[str] | None = None
) -> tuple[Violation, ...]:
    """Find what is wrong with the model's view of a step.

    Args:
        prepared: the state after preparation.
        batch: the batch.
        view: what ``forward_batch`` made of them.
        ids: of ``VIEW``; default all.
    """
    return collect(VIEW, ids, read_ledger(prepared), batch, view)


def check_committed(
    prepared: DecodeState, out: StepOutput, after: DecodeState, ids: Iterable[str] | None = None
) -> tuple[Violation, ...]:
    """Find what is wrong with a step from its preparation on.

    Args:
        prepared: the state after preparation.
        out: the step's output.
        after: the state that the step returned.
        ids: of ``COMMITTED``; default all.
    """
    return collect(COMMITTED, ids, read_ledger(prepared), out, read_ledger(after))


def check_closed(before: DecodeState, after: DecodeState, ids: Iterable[str] | None = None) -> tuple[Violation, ...]:
    """Find what is wrong with the closing of the requests that ``after`` lacks.

    Args:
        before: with them.
        after: without.
        ids: of ``CLOSED``; default all.
    """
    return collect(CLOSED, ids, read_ledger(before), read_ledger(after))


def check_forked(
    before: DecodeState, after: DecodeState, parent_id: int, fork_id: int, ids: Iterable[str] | None = None
) -> tuple[Violation, ...]:
    """Find what is wrong with a fork.

    Args:
        before: the state given.
        after: the state returned.
        parent_id: the request forked.
        fork_id: the new one.
        ids: of ``FORKED``; default all.
    """
    return collect(FORKED, ids, read_ledger(before), read_ledger(after), parent_id, fork_id)
