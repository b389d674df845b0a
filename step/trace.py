"""A step that says what it did: which request, which position, which slot is read, which is written, who owns the row.

``trace_step`` is ``decode_step`` beside two readings of the tables, before and after preparation. It copies tables and
lists histories, so it is for looking, not for speed.

Source: none; the stages are those of ``step/decode.py``, the questions those of the decode-path sheet, section 10.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs

from ..model.model import Model
from ..state.batch import ScheduleBatch, StepOutput
from ..state.config import Config
from ..state.decode import DecodeState
from ..state.ledger import read_ledger
from .decode import decode_step
from .forward_batch import forward_batch
from .metadata import token_positions
from .prepare import distinct_ids, prepare_decode
from .refeed import refeed_last
from .trace_layers import CAPTURED, LayerView
from .trace_stages import StageWriter
from .trace_tables import HostView, ints
from .trace_values import Trace, TraceStage

__all__ = ["trace_step"]


def trace_step(
    model: Model,
    state: DecodeState,
    *,
    only: Iterable[int] | None = None,
    force: Mapping[int, int] | None = None,
) -> tuple[DecodeState, StepOutput, Trace]:
    """Decode one token for every running request, and tell what every stage of the step did.

    Args:
        model: the model.
        state: before the step; it keeps its content and may be stepped again.
        only: requests to run, in this row order; default all running ones in order of opening.
        force: request -> token to feed instead of its pending one.
    Returns:
        (state, out, trace): the first two are what ``decode_step`` returns, bit for bit; the trace is host data, as
        long as the histories of the open requests.
    Raises:
        RequestError: an unknown, finished or repeated request, or one that has no token to feed.
        CapacityError: a pool is short; nothing was changed.
    """
    if only is not None:
        only = distinct_ids(only, "only")
        state = refeed_last(state, [i for i in only if force is None or i not in force])
    after, out = decode_step(model, state, only=only, force=force, capture=CAPTURED)
    prepared, batch = prepare_decode(state, only=only, force=force)
    view = forward_batch(prepared, batch, rowwise=model.numerics.invariant)
    host = HostView(before=read_ledger(state), prepared=read_ledger(prepared), batch=batch)
    rows, positions = token_positions(batch)
    writer = StageWriter(
        axes=_axes(model.config, batch, len(rows)),
        request_ids=tuple(batch.request_ids[row] for row in rows),
        positions=ints(positions),
    )
    stages: list[TraceStage] = []
    if out.captured is not None:
        layers = LayerView(config=model.config, host=host, view=view, captured=out.captured, writer=writer)
        stages += _before_layers(writer, host, model.config)
        for i in range(model.config.num_hidden_layers):
            stages += layers.stages(i)
        stages += _after_layers(writer, host, model.config, out)
    trace = Trace(
        forward_mode=batch.forward_mode.value,
        axes=dict(writer.axes),
        compress_ratios=tuple(model.config.compress_ratios),
        page_size=state.table.sizes.page_size,
        requests=host.requests(out),
        pools=host.pools(),
        stages=tuple(stages),
    )
    return after, attrs.evolve(out, captured=None), trace


def _axes(config: Config, batch: ScheduleBatch, n_tokens: int) -> dict[str, int]:
    return {
        "B": len(batch.request_ids),
        "T": n_tokens,
        "L": config.num_hidden_layers,
        "M": config.hc_mult,
        "H": config.hidden_size,
        "N": config.num_attention_heads,
        "D": config.head_dim,
        "Q": config.q_lora_rank,
        "W": config.sliding_window,
        "P": config.index_topk,
        "E": config.n_routed_experts,
        "K": config.num_experts_per_tok,
        "V": config.vocab_size,
    }


def _before_layers(writer: StageWriter, host: HostView, config: Config) -> Iterator[TraceStage]:
    yield writer.stage(
        "prepare",
        "Every row gets the slot of its next position, under the old length; then the length grows. Nothing is in the "
        "slot yet.",
        ("i64[B]",),
        reads=host.allocation_reads(),
        writes=host.allocation_writes(),
        next_input="the token sampled last is known by its id alone",
    )
    yield writer.stage(
        "forward_batch",
        "Input ids, positions and page tables become tensors; the model sees no request any more.",
        ("i64[B]", "i64[T]"),
        reads=host.view_reads(config.sliding_window),
        next_input="input_ids[i] = relay[row of i]: the sample of the step before is this step's input"
        if host.batch.input_ids is None
        else "input_ids are given by the host: a forced token, or several that wait",
    )
    yield writer.stage(
        "embed",
        "One row of the embedding per token, copied into M residual streams.",
        ("i64[T]", "float[T,H]", "float[T,M,H]"),
        vocabulary="as rows of the table: all V on this rank",
    )


def _after_layers(writer: StageWriter, host: HostView, config: Config, out: StepOutput) -> Iterator[TraceStage]:
    yield writer.stage(
        "head",
        "Each request's last row: streams to one hidden row, normed, times the head.",
        ("float[T,M,H]", "float[B,H]", "f32[B,V]"),
        ownership="unchanged: rows are the batch's requests",
        shards="unchanged: the head is cut over one rank, nothing is gathered",
        vocabulary=f"whole from here: {config.vocab_size} scores a row",
    )
    yield writer.stage(
        "sample",
        "One id per row from its scores, its parameters, its seed and its position.",
        ("f32[B,V]", "i64[B]"),
        vocabulary="whole, and no longer needed after this",
        next_input="an id is chosen; its keys and values do not exist before the next step's layers",
    )
    yield writer.stage(
        "relay",
        "The ids go to the rows of the request table, where the next step looks, in whatever order it then runs.",
        ("i64[B]",),
        writes=host.relay_writes(out),
        next_input="relay[row] = id: the next step's input_ids",
    )
    yield writer.stage(
        "commit",
        "The host reads the ids, once, appends them to the requests and sees who has finished.",
        ("i64[B]",),
        next_input="the id is the request's last token and waits to be fed at the next position",
    )
