"""What a traced step is made of: plain host values that ``attrs.asdict`` turns into JSON.

Every stage of a step answers the same questions, one field each: how many tokens, which shapes, whose tokens, at which
logical positions, what is read, what is written, whether a row changes its owner or a tensor its shards, whether the
whole vocabulary is there, and how the sample becomes the next input.

Source: none; the questions are those of the decode-path sheet, section 10.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

__all__ = [
    "NOT_HERE",
    "NO_PART",
    "ONE_RANK",
    "UNCHANGED",
    "Access",
    "Choice",
    "ExpertRows",
    "Shape",
    "Trace",
    "TracePool",
    "TraceRequest",
    "TraceStage",
]

Ints = tuple[int, ...]

UNCHANGED: Final = "unchanged"
"""Answer about owners of a stage that moves no row."""

ONE_RANK: Final = "unchanged: one rank holds everything"
"""Answer about shards."""

NOT_HERE: Final = "not here"
"""Answer about the vocabulary of a stage that has no axis V."""

NO_PART: Final = "no part in it"
"""Answer about the next input of a stage that does not touch it."""


@attrs.frozen(kw_only=True)
class Shape:
    """A tensor's shape in letters and in numbers.

    Attributes:
        token: as in ``float[T,M,H]``.
        sizes: the numbers of this step.
    """

    token: str
    sizes: Ints


@attrs.frozen(kw_only=True)
class Access:
    """Rows of one store that a stage reads or writes for one request.

    Attributes:
        store: a cache (``swa``, ``c4``, ``index``, ``c128`` and their ``_state``), a table, or ``relay``.
        layer: whose rows of a cache; None for tables and the relay.
        request_id: for whom.
        positions: logical position of every row: of the token, or of the last token of a compressed group; a negative
            one lies before the first token and is the dummy row. Empty for reference counts.
        slots: rows of the store, within the layer. Of ``req_to_token`` and ``sidecar``: columns of the request's row.
        values: what the table or the relay holds there afterwards; empty for caches.
    """

    store: str
    layer: int | None
    request_id: int
    positions: Ints
    slots: Ints
    values: Ints


@attrs.frozen(kw_only=True)
class Choice:
    """What one token row chose: experts, or compressed entries.

    Attributes:
        request_id: whose token.
        position: where it stands.
        n_candidates: how many there were to choose from.
        ids: what was chosen.
        weights: of the chosen experts; empty for entries.
    """

    request_id: int
    position: int
    n_candidates: int
    ids: Ints
    weights: tuple[float, ...]


@attrs.frozen(kw_only=True)
class ExpertRows:
    """The token rows that one expert computes.

    Attributes:
        expert_id: the expert.
        rows: token rows of the step.
    """

    expert_id: int
    rows: Ints


@attrs.frozen(kw_only=True)
class TraceStage:
    """One stage of a step.

    Attributes:
        name: as in ``2.attn.window``: layer, sublayer, what is done.
        layer: 0 to L-1, or None outside the layers.
        title: what happens, in one sentence.
        n_tokens: how many tokens now.
        shapes: what the tensor is before, in between and after.
        request_ids: whose token every row is.
        positions: at which logical position it stands.
        reads: which history is read.
        writes: which state is written.
        ownership: whether rows change their owner.
        shards: whether a tensor changes how it is cut over ranks.
        vocabulary: whether the whole vocabulary is there.
        next_input: how the sample becomes the next input.
        choices: of experts or entries, by token row.
        experts: which expert computes which rows.
    """

    name: str
    layer: int | None
    title: str
    n_tokens: int
    shapes: tuple[Shape, ...]
    request_ids: Ints
    positions: Ints
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    ownership: str
    shards: str
    vocabulary: str
    next_input: str
    choices: tuple[Choice, ...]
    experts: tuple[ExpertRows, ...]


@attrs.frozen(kw_only=True)
class TraceRequest:
    """One open request across the step.

    Attributes:
        request_id: its id.
        row: its row of the request table.
        batch_row: its row of this batch, or None when it does not run.
        len_before: positions that own a slot before the step.
        len_after: the same after it; also the length that the kernels see.
        tokens: every token up to ``len_after``.
        input_ids: those that this step feeds.
        positions: theirs.
        out_full_loc: full slots of the fed tokens.
        out_swa_loc: their window slots.
        slot_rules: how each of them was found.
        out_c4_loc: slots of the groups of 4 that the fed tokens close.
        out_c128_loc: slots of the groups of 128.
        slots_before: the request's row of ``req_to_token``.
        slots_after: the same after the step.
        windows_before: window slot of every position, 0 where it was given back.
        windows_after: the same after the step.
        sidecar_before: C128 pages.
        sidecar_after: the same after the step.
        sampled: the token chosen for it, or None when it does not run.
        finished: why it ended in this step, or None.
    """

    request_id: int
    row: int
    batch_row: int | None
    len_before: int
    len_after: int
    tokens: Ints
    input_ids: Ints
    positions: Ints
    out_full_loc: Ints
    out_swa_loc: Ints
    slot_rules: tuple[str, ...]
    out_c4_loc: Ints
    out_c128_loc: Ints
    slots_before: Ints
    slots_after: Ints
    windows_before: Ints
    windows_after: Ints
    sidecar_before: Ints
    sidecar_after: Ints
    sampled: int | None
    finished: str | None


@attrs.frozen(kw_only=True)
class TracePool:
    """What a step does to one free list.

    Attributes:
        name: ``full``, ``window`` or ``c128``.
        page_size: slots per page.
        n_free_before: free pages.
        n_free_after: the same after the step.
        next_before: the pages that would be taken next, a few of them.
        next_after: the same after the step.
        taken: pages that requests of this step took, in batch order.
        given: pages given back because every window has passed them.
    """

    name: str
    page_size: int
    n_free_before: int
    n_free_after: int
    next_before: Ints
    next_after: Ints
    taken: Ints
    given: Ints


@attrs.frozen(kw_only=True)
class Trace:
    """One step, seen from the host.

    Attributes:
        forward_mode: ``decode``, or ``extend`` where a request had several tokens to feed.
        axes: letter of ``state/dims.py`` -> its number in this step.
        compress_ratios: of every layer.
        page_size: tokens per full and window page.
        requests: every open request, in order of opening.
        pools: the three free lists.
        stages: in the order in which they happen; none when no request runs.
    """

    forward_mode: str
    axes: Mapping[str, int]
    compress_ratios: Ints
    page_size: int
    requests: tuple[TraceRequest, ...]
    pools: tuple[TracePool, ...]
    stages: tuple[TraceStage, ...]

    @property
    def running(self) -> tuple[TraceRequest, ...]:
        """The requests that run, by batch row."""
        rows = {request.batch_row: request for request in self.requests}
        return tuple(rows[i] for i in sorted(row for row in rows if row is not None))
