"""What one step runs (``ScheduleBatch``), what the model sees of it (``ForwardBatch``) and what comes out.

Names follow SGLang's (``schedule_batch.py``, ``forward_batch_info.py``), so that a reader of the one finds the other;
decode-path sheet, section 2. Lists such as ``out_c4_loc`` are dense lists of closing tokens, not rows of the batch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .captured import Captured
from .paged_tables import AscendTables
from .shares import RowShares
from .values import value

__all__ = [
    "AttentionMetadata",
    "CacheLocs",
    "ChunkMetadata",
    "CompressorMetadata",
    "ForwardBatch",
    "ForwardMode",
    "Logprobs",
    "MHCState",
    "ScheduleBatch",
    "SingleMetadata",
    "StepOutput",
]

Ints = NDArray[np.int64]


class ForwardMode(enum.Enum):
    """What kind of step a batch is."""

    DECODE = "decode"
    EXTEND = "extend"

    def is_decode(self) -> bool:
        """Tell whether every row is one token that the relay feeds."""
        return self is ForwardMode.DECODE


@attrs.frozen(eq=False, kw_only=True)
class CacheLocs:
    """The four slot vectors of one allocation, on the host, in token order.

    Attributes:
        out_full_loc: i64[T]. Full slot of every token.
        out_swa_loc: i64[T]. Its window slot.
        out_c4_loc: i64[C]. One slot per token that closes a group of 4.
        out_c128_loc: i64[C]. One slot per token that closes a group of 128.
    """

    out_full_loc: Ints
    out_swa_loc: Ints
    out_c4_loc: Ints
    out_c128_loc: Ints


@attrs.frozen(eq=False, kw_only=True)
class ScheduleBatch:
    """Which requests a step runs, prepared on the host; rows in the caller's order.

    Attributes:
        forward_mode: decode or extend.
        request_ids: one per row.
        req_pool_indices: i64[B]. Table row per batch row.
        prefix_lens: i64[B]. Positions that own a slot before the step.
        seq_lens: i64[B]. The same after it; decode: prefix + 1.
        orig_seq_lens: i64[B]. Equal to ``seq_lens`` here; upstream differs only for truncated inputs.
        seq_lens_sum: sum of ``seq_lens``.
        input_ids: i64[T] known on the host, or None: take them from the relay.
        sample_rows: i64[B]. Rows whose request has no unfed token left; only these may sample.
        out_cache_loc: i64[T]. Full slots as allocated (virtual).
        out_cache_loc_dsv4: all four slot vectors.
    """

    forward_mode: ForwardMode
    request_ids: tuple[int, ...]
    req_pool_indices: Ints
    prefix_lens: Ints
    seq_lens: Ints
    orig_seq_lens: Ints
    seq_lens_sum: int
    input_ids: Ints | None
    sample_rows: Ints
    out_cache_loc: Ints
    out_cache_loc_dsv4: CacheLocs

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """Requests of ``sample_rows``, in row order."""
        if len(self.sample_rows) == len(self.request_ids):  # they are in row order, so these are all
            return self.request_ids
        return tuple([self.request_ids[row] for row in self.sample_rows.tolist()])

    @property
    def extend_lens(self) -> Ints:
        """Tokens of every row in this step: i64[B]."""
        return self.seq_lens - self.prefix_lens


@value
@attrs.frozen(eq=False, kw_only=True)
class CompressorMetadata:
    """Where one compressor reads and writes in this step; index tensors on the model's device.

    Online pooling of C128 has one state row for the open group of a request, so three fields mean something else there:
    ``history`` is the state that each group goes on from, those that close in this step first; ``members`` are its
    tokens in order, filled up with T, which stands for no token; ``keep`` are the groups that stay open.

    Attributes:
        phase: i64[T]. Position modulo the ratio.
        out_loc: i64[C]. Slot of every entry that closes in this step.
        first_pos: i64[C]. First position of its group; the entry's rotary position.
        history: i64[A]. State slots to read before anything is written.
        members: i64[C,A]. The members of each closing group as rows of (history, then the T tokens of this step).
        keep: i64[A]. Token rows whose state outlives the step.
        state_loc: i64[A]. Their state slots.
    """

    phase: Tensor
    out_loc: Tensor
    first_pos: Tensor
    history: Tensor
    members: Tensor
    keep: Tensor
    state_loc: Tensor


@value
@attrs.frozen(eq=False, kw_only=True)
class SingleMetadata:
    """What rows with one token read: padded tables, one line per such row.

    Attributes:
        rows: i64[B] token rows, or None when they are all rows in order.
        window_loc: i64[B,W]. Window slots, oldest first, then the sink.
        window_mask: bool[B,W].
        c4_pages: i64[B,C]. Full pages; C4 entry g lies at ``page[g div n] * n + g mod n``, n entries a page.
        c4_visible: i64[B]. Entries that the query sees.
        c128_pages: i64[B,C]. C128 pages.
        c128_visible: i64[B].
        n_c4: largest ``c4_visible``, a host number.
        n_c128: largest ``c128_visible``.
    """

    rows: Tensor | None
    window_loc: Tensor
    window_mask: Tensor
    c4_pages: Tensor
    c4_visible: Tensor
    c128_pages: Tensor
    c128_visible: Tensor
    n_c4: int
    n_c128: int


@value
@attrs.frozen(eq=False, kw_only=True)
class ChunkMetadata:
    """What one row with several tokens reads.

    Attributes:
        start: first token row of the chunk.
        prefix_len: positions before it.
        seq_len: positions up to its end.
        window_start: position of the first window slot.
        window_loc: i64[S]. Window slots of positions ``window_start .. seq_len - 1``.
        c4_loc: i64[C]. Slots of entries 0..seq_len//4-1.
        c128_loc: i64[C]. Slots of entries 0..seq_len//128-1.
    """

    start: int
    prefix_len: int
    seq_len: int
    window_start: int
    window_loc: Tensor
    c4_loc: Tensor
    c128_loc: Tensor


@value
@attrs.frozen(eq=False, kw_only=True)
class AttentionMetadata:
    """Everything that the layers of one forward read and write by, built once per step.

    Attributes:
        swa_loc: i64[T]. Window slot of every token.
        compressors: ratio -> where its compressor reads and writes; absent ratios are not in the model.
        singles: rows with one token, or None.
        chunks: rows with several tokens.
        tables: what Ascend kernels read by, instead of singles and chunks; None for caches of the plain form.
    """

    swa_loc: Tensor
    compressors: Mapping[int, CompressorMetadata]
    singles: SingleMetadata | None
    chunks: tuple[ChunkMetadata, ...]
    tables: AscendTables | None = None


@value
@attrs.frozen(eq=False, kw_only=True)
class ForwardBatch:
    """One forward as the model sees it.

    Attributes:
        forward_mode: decode or extend.
        batch_size: B.
        input_ids: i64[T]. Token to embed.
        req_pool_indices: i64[B].
        seq_lens: i64[B]. Visible length including the new tokens.
        seq_lens_cpu: i64[B]. Host mirror.
        seq_lens_sum: sum of ``seq_lens_cpu``.
        orig_seq_lens: i64[B].
        positions: i64[T]. Decode: ``seq_lens - 1``.
        out_cache_loc: i64[T]. Write locations in the space that kernels use.
        out_cache_loc_virtual: i64[T], only where a translation took place.
        last_rows: i64[B]. Token row of each request's last token.
        metadata: what the layers read and write by.
        shares: what every replica of a layout over ranks brings; None on one rank.
    """

    forward_mode: ForwardMode
    batch_size: int
    input_ids: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Ints
    seq_lens_sum: int
    orig_seq_lens: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    out_cache_loc_virtual: Tensor | None
    last_rows: Tensor
    metadata: AttentionMetadata
    shares: RowShares | None = None


@value
@attrs.frozen(eq=False, kw_only=True)
class MHCState:
    """The residual streams between two layers.

    Attributes:
        streams: float[T,M,H].
    """

    streams: Tensor


@value
@attrs.frozen(eq=False, kw_only=True)
class Logprobs:
    """Raw log-probabilities, before penalties, temperature and truncation.

    Attributes:
        token_logprobs: f32[B]. Of the sampled token.
        top_ids: i64[B,P]. The most likely tokens; P is the most that a row asked for.
        top_logprobs: f32[B,P].
        counts: how many of the P each row asked for; None for a row that asked for no logprobs.
    """

    token_logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    counts: tuple[int | None, ...]


@value
@attrs.frozen(eq=False, kw_only=True)
class StepOutput:
    """What a step gives back besides the next state; rows in the order of ``request_ids``.

    Attributes:
        request_ids: the rows.
        next_token_ids: the token sampled for each row; empty when the step did not sample.
        logits: f32[B,V], or f32[T,V] with ``logits="all"`` (rows of a request together, in order).
        logprobs: for rows that asked; None when none did.
        finished: request id -> "stop" or "length", for requests that this step ended.
        captured: the inner stages that were asked for; None when none were, or when nothing ran.
    """

    request_ids: tuple[int, ...]
    next_token_ids: tuple[int, ...]
    logits: Tensor
    logprobs: Logprobs | None
    finished: Mapping[int, str]
    captured: Captured | None = None
