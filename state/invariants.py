"""Invariants of the decode path as predicates that return what is violated, for tests of this engine or another one.

=================== ===================================== ===========================================================
table               facts                                 what it is about
=================== ===================================== ===========================================================
``STATE``           (ledger)                              any state, at any time
``PREPARED``        (before, batch, after)                ``prepare_decode`` and ``prepare_extend``
``VIEW``            (prepared, batch, view)               ``forward_batch``
``SAMPLED``         (draws, sampling before and after)    the choice of tokens
``COMMITTED``       (prepared, out, after)                forward, sampling, relay, commit
``CLOSED``          (before, after)                       ``close_request``
``RETRACTED``       (before, after, request id)           ``retract_request``
``FORKED``          (before, after, parent, fork, n)      ``fork_request``, n tokens shared
``REWOUND``         (before, after, request id, n)        ``rewind_request``
``TRANSLATED``      (``Translation``)                     one layout of slots
``SHARDED``         (layouts of all ranks, ids)           layouts that deal positions to ranks
``MIXED``           (``Mix``)                             mixing weights of mHC
``ROUTED``          (``Routing``)                         experts chosen and their weights
``DISPATCHED``      (ids, order, counts)                  rows sorted by expert
``COMBINED``        (``Combination``)                     what the experts gave
``PERMUTED``        (order, out, out of permuted rows)    any function of rows
=================== ===================================== ===========================================================

Each table maps ids to predicates, which yield (where, what is wrong). For states, steps and requests they take
``Ledger`` values (``read_ledger(state)``), and a ``check`` function below runs a table, or some of its ids, on the
states themselves; ``check_facts`` runs any table on its facts, so that plain tensors of another engine will do.

Ids are those of the decode-path sheet, section 9. Those that begin with N have no counterpart there: sharing, records,
forks. There is no prefix tree, but forks share whole pages with refcounts, so "named by one live request" became "the
page being written has refcount 1 and is named by its writer only". What of the sheet is not here:

================ =====================================================================================================
ids              why
================ =====================================================================================================
L09, B15         about overlapped scheduling: a step is over before the next one begins
A17, A18, W11    compare two runs instead of looking at one; so do C17-C19, B05, S05's other half. Tests do that
C20              about picks, which no state holds; a test of the operator
T05              in ``VIEW``: making a view leaves the batch's slots as they are
B01-B03          about filter and merge: a batch is made anew for every step, from the requests' rows (L12, H04)
B06-B08          about padding rows: batches have none
B09, B10, M09    about several ranks, and tested over them; so are M10, M13, H01-H03, H05, H06, S07, S08
M11              about padding rows again
B11, B12         about the choice of whom to retract, which is a scheduler's
E04, E06         about a prefix tree
R02-R04          L10 of ``STATE``, ``PREPARED`` and ``VIEW``: what is fed is the owner's own last token
G01              about grammars, which lie outside a state
================ =====================================================================================================

``check`` is cheap enough to run after every step of a debug server: it copies the tables, a few numbers for each token
of the capacity, and no cache rows. 16 requests of 2,000 tokens in pages of 128 take about 6 ms on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from torch import Tensor

from .batch import ForwardBatch, ScheduleBatch, StepOutput
from .decode import DecodeState
from .invariants_allocated import ALLOCATED
from .invariants_committed import COMMITTED as COMMITTED
from .invariants_compressed import COMPRESSED
from .invariants_histories import CLOSED as CLOSED
from .invariants_histories import FORKED as FORKED
from .invariants_histories import RETRACTED as RETRACTED
from .invariants_histories import REWOUND as REWOUND
from .invariants_layouts import SHARDED as SHARDED
from .invariants_layouts import TRANSLATED as TRANSLATED
from .invariants_layouts import Translation as Translation
from .invariants_pages import PAGES
from .invariants_prepared import LENGTHS
from .invariants_reach import REACH
from .invariants_requests import REQUESTS
from .invariants_sampled import SAMPLED as SAMPLED
from .invariants_sampled import Draw as Draw
from .invariants_sampled import read_draws as read_draws
from .invariants_stages import COMBINED as COMBINED
from .invariants_stages import DISPATCHED as DISPATCHED
from .invariants_stages import MIXED as MIXED
from .invariants_stages import PERMUTED as PERMUTED
from .invariants_stages import ROUTED as ROUTED
from .invariants_stages import Combination as Combination
from .invariants_stages import Mix as Mix
from .invariants_stages import Routing as Routing
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
    "COMBINED",
    "COMMITTED",
    "DISPATCHED",
    "FORKED",
    "MIXED",
    "PERMUTED",
    "PREPARED",
    "RETRACTED",
    "REWOUND",
    "ROUTED",
    "SAMPLED",
    "SHARDED",
    "STATE",
    "TRANSLATED",
    "VIEW",
    "Combination",
    "Draw",
    "Found",
    "Holding",
    "Ledger",
    "Mix",
    "Routing",
    "Translation",
    "Violation",
    "check",
    "check_closed",
    "check_committed",
    "check_facts",
    "check_forked",
    "check_prepared",
    "check_retracted",
    "check_rewound",
    "check_sampled",
    "check_view",
    "digest",
    "read_draws",
    "read_ledger",
]

STATE: Final[Mapping[str, Callable[[Ledger], Found]]] = {**REQUESTS, **PAGES, **WINDOW, **COMPRESSED, **REACH}
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


def check_facts(
    table: Mapping[str, Callable[..., Found]], *facts: object, ids: Iterable[str] | None = None
) -> tuple[Violation, ...]:
    """Run any table on its facts.

    Args:
        table: one of the tables here, or of your own.
        facts: what each of its predicates takes.
        ids: of the table; default all.
    """
    return collect(table, ids, *facts)


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


def check_sampled(
    prepared: DecodeState,
    logits: Tensor,
    mask: Mapping[int, Tensor] | None,
    out: StepOutput,
    after: DecodeState,
    ids: Iterable[str] | None = None,
) -> tuple[Violation, ...]:
    """Find what is wrong with the choice of tokens.

    Args:
        prepared: the state after preparation.
        logits: f32[B,V]. Of each row's last token.
        mask: request -> packed vocabulary bits, as the step was given it.
        out: the step's output.
        after: the state that the step returned.
        ids: of ``SAMPLED``; default all.
    """
    return collect(SAMPLED, ids, read_draws(prepared, logits, mask, out), prepared.sampling, after.sampling)


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


def check_retracted(
    before: DecodeState, after: DecodeState, request_id: int, ids: Iterable[str] | None = None
) -> tuple[Violation, ...]:
    """Find what is wrong with a retraction.

    Args:
        before: the state given.
        after: the state returned.
        request_id: the request retracted.
        ids: of ``RETRACTED``; default all.
    """
    return collect(RETRACTED, ids, read_ledger(before), read_ledger(after), request_id)


def check_forked(
    before: DecodeState,
    after: DecodeState,
    parent_id: int,
    fork_id: int,
    at: int | None = None,
    ids: Iterable[str] | None = None,
) -> tuple[Violation, ...]:
    """Find what is wrong with a fork.

    Args:
        before: the state given.
        after: the state returned.
        parent_id: the request forked.
        fork_id: the new one.
        at: tokens shared; default all.
        ids: of ``FORKED``; default all.
    """
    ledger = read_ledger(before)
    parent = ledger.by_id.get(parent_id)
    n = at if at is not None else 0 if parent is None else len(parent.tokens)
    return collect(FORKED, ids, ledger, read_ledger(after), parent_id, fork_id, n)


def check_rewound(
    before: DecodeState, after: DecodeState, request_id: int, n: int, ids: Iterable[str] | None = None
) -> tuple[Violation, ...]:
    """Find what is wrong with a rewind.

    Args:
        before: the state given.
        after: the state returned.
        request_id: the request cut back.
        n: tokens kept.
        ids: of ``REWOUND``; default all.
    """
    return collect(REWOUND, ids, read_ledger(before), read_ledger(after), request_id, n)
