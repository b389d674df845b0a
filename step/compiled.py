"""``decode_step`` as static graphs: the same functions, traced and compiled once for every bucket of shapes.

A layer is three kinds of graph, so that layers of one kind share their code. Graphs take raw cache rows and index
tensors and write the rows in place; handles stay outside, so a compiled step is as pure as an eager one. A step that
fits no bucket, feeds several tokens of a request or looks into stages runs eagerly.

============= ============================================ ========================= =========================
graph         computes                                     one for every             follows the bucket's
============= ============================================ ========================= =========================
``inputs``    first streams, rotations                                               rows
``streams``   streams after a sublayer, next one's input                             rows
``attention`` state written, history read, projections     compress ratio            rows, context
``experts``   routing, routed and shared experts           router (hash, scored)     rows
``head``      streams after the last layer, logits                                   rows
============= ============================================ ========================= =========================

Attention of ratio 128 has a second graph for steps in which a group of 128 closes: most close none.

Source: none; the composition is that of ``step/decode.py`` and ``model/layer.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, Final

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..model.forward import embed_tokens, forward
from ..model.layer import head_logits, mixture, sublayer_input
from ..model.leaves import has_stored
from ..model.model import Model
from ..model.packing import pack_experts, packed_params, packs_experts, packs_weights, traced_model
from ..model.paged import layer_rows, paged_attention, rotations, write_rows
from ..model.params import AttentionParams, LayerParams, MoEParams, Params, StreamParams
from ..ops.graph import Draft, Graph, compile_drafts, draft_graph
from ..ops.helper import MOST_HELPERS, Helper
from ..ops.traced import Turns
from ..state.batch import ForwardBatch, StepOutput
from ..state.capacity import C4_RATIO, C128_RATIO, Capacity
from ..state.decode import DecodeState
from ..state.errors import ConfigError
from ..state.kv import CacheForm, KVLayout, KVState
from ..state.sampling import SamplingParams
from .border import owned_step
from .commit import commit
from .decode import begin_decode, decode_step, empty_output, finish_step
from .edits import Edits
from .forward_batch import forward_batch
from .padding import Bucket, as_buckets, pad_decode
from .prepare import prepare_decode, prepare_extend
from .replays import Replay
from .requests import init_state, open_request

__all__ = ["CompiledGraph", "CompiledStep", "compile_step"]

DEFAULT_BUCKETS: Final = ((1, 2048), (4, 2048), (16, 2048))
"""(rows, context) of a small server."""

Progress = Callable[[int, int], None]


@attrs.frozen(eq=False, kw_only=True)
class CompiledGraph:
    """One line of the report.

    Attributes:
        bucket: the first one that it was compiled for; others of the same shapes share it.
        name: what it computes.
        n_operators: of the traced function.
        seconds: that tracing and compiling took; little where the compiler's cache on disk had it.
        graph: runs it.
    """

    bucket: Bucket
    name: str
    n_operators: int
    seconds: float
    graph: Graph


@attrs.frozen(eq=False, kw_only=True)
class CompiledStep:
    """A decode step over compiled graphs; called like ``decode_step``.

    Attributes:
        model: that was compiled.
        traced: the same model as the graphs want it.
        weights: by bucket, the model's own or packed ones.
        page_size: of the states that it steps.
        caches: their form.
        graphs: by name and shapes.
        buckets: rising; a step runs in the first that holds it.
    """

    model: Model
    traced: Model
    weights: Mapping[Bucket, _Weights]
    page_size: int
    caches: CacheForm
    graphs: Mapping[Any, CompiledGraph]
    buckets: tuple[Bucket, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights that were copied into another layout."""
        own = {id(leaf) for leaf in pytree.tree_leaves((self.model.params, self.traced.frequencies))}
        leaves = [leaf for one in self.weights.values() for leaf in one.leaves]
        copies = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in own}
        return sum(leaf.nbytes for leaf in copies.values())

    @property
    def report(self) -> tuple[CompiledGraph, ...]:
        """What was compiled, in order. There is no graph break: a function that is no single graph does not compile."""
        return tuple(self.graphs.values())

    def __str__(self) -> str:
        """Lay the report out as a table."""
        lines = [f"{'bucket':>14}  {'graph':<28} {'operators':>9} {'seconds':>8} {'breaks':>6}"]
        lines += [
            f"{f'{one.bucket.rows} x {one.bucket.context}':>14}  {one.name:<28} {one.n_operators:>9} "
            f"{one.seconds:>8.1f} {0:>6}"
            for one in self.report
        ]
        return "\n".join(lines)

    @torch.no_grad()
    def __call__(
        self,
        model: Model,
        state: DecodeState,
        *,
        only: Iterable[int] | None = None,
        force: Mapping[int, int] | None = None,
        mask: Mapping[int, Tensor] | None = None,
        capture: Iterable[str] = (),
        replay: Replay | None = None,
        edit: Edits | None = None,
    ) -> tuple[DecodeState, StepOutput]:
        """Decode one token for every running request; see ``decode_step`` for what goes in and what comes out.

        Raises:
            ConfigError: another model than the compiled one, or a state of another page size or form of caches.
        """
        if model is not self.model:
            raise ConfigError(
                "compiled step: expected the model that it was compiled for, got another; compile_step(model) again, "
                "weights are part of it",
                field="model",
            )
        capture = tuple(capture)
        if capture or replay is not None or edit is not None:
            return decode_step(
                model, state, only=only, force=force, mask=mask, capture=capture, replay=replay, edit=edit
            )
        self._require_caches(state)
        with owned_step(model, state):
            before = state
            state, batch = begin_decode(state, only, force)
            if not batch.request_ids:  # nothing runs: nothing changes
                return before, empty_output(model)
            view = forward_batch(state, batch, rowwise=model.numerics.invariant)
            bucket = self._bucket_of(view.batch_size, int(view.seq_lens_cpu.max()))
            is_plain = bool((batch.extend_lens == 1).all())
            if bucket is None or not is_plain:
                kv, logits = forward(model, state.kv, view)
            else:
                kv, logits = _decode(self.traced, self.weights[bucket], self._graph_of, state.kv, view, bucket)
            return finish_step(model, attrs.evolve(state, kv=kv), batch, view, logits, mask)

    def holds(self, rows: int, context: int) -> bool:
        """Tell whether a decode of so many requests, the longest of so many tokens after it, runs compiled."""
        return self._bucket_of(rows, context) is not None

    def _bucket_of(self, rows: int, context: int) -> Bucket | None:
        return next((one for one in self.buckets if one.holds(rows, context)), None)

    def _require_caches(self, state: DecodeState) -> None:
        layout = state.kv.layout
        if layout.sizes.page_size != self.page_size or layout.form != self.caches:
            expected, got = (self.page_size, self.caches), (layout.sizes.page_size, layout.form)
            raise ConfigError(
                f"state: expected pages of {expected[0]} tokens and caches of the {expected[1]} form, for which the "
                f"step was compiled, got {got[0]} and {got[1]}; pass page_size= and caches= to compile_step",
                field="state",
                expected=expected,
                got=got,
            )

    def _graph_of(self, key: Any, *_rest: Any) -> Graph:
        return self.graphs[key].graph


@torch.no_grad()
def compile_step(
    model: Model,
    buckets: Iterable[Bucket | tuple[int, int]] = DEFAULT_BUCKETS,
    *,
    page_size: int = 128,
    caches: CacheForm | None = None,
    progress: Progress = lambda done, total: None,
) -> CompiledStep:
    """Compile the decode step of a model.

    On a CPU weights that thin products read are copied into the layout that they are fastest in, except for buckets of
    few rows. Nothing is compiled later: a step either fits a bucket or runs eagerly. With ``Numerics(invariant=True)``
    operators are not fused, and bits are those of eager steps.

    Args:
        model: on one rank, with expanded weights, on kernels of this package.
        buckets: (rows, context) that steps are padded to: the most requests of a step, and the most tokens of each.
        page_size: of the states that will be stepped.
        caches: their form; default the model's.
        progress: told how many graphs are done, of how many, and at first that none is.
    Returns:
        A function with the signature and the results of ``decode_step``; ``print`` shows what was compiled.
    Raises:
        ConfigError: no bucket, one beyond the model's positions, a model that steps by other means, no C++ compiler, or
            no folder for what it makes.
    """
    found = as_buckets(buckets, model.config.max_position_embeddings)
    _require_plain(model)
    traced = traced_model(model)
    weights = _weights(traced, found)
    form = model.cache_form if caches is None else caches
    with _Workshop(model, _count(model, found, form), progress) as workshop:
        for bucket in found:
            for length in (1, C128_RATIO):  # a step that closes no group of 128, and one that does
                kv, view = _example(model, page_size, form, length)
                _decode(traced, weights[bucket], partial(workshop.graph_of, bucket, kv.layout), kv, view, bucket)
        graphs = workshop.finish()
    return CompiledStep(
        model=model, traced=traced, weights=weights, page_size=page_size, caches=form, graphs=graphs, buckets=found
    )


@attrs.frozen(eq=False, kw_only=True)
class _Pending:
    """A graph between tracing and compiling: what its line of the report will say, and the arguments that traced it."""

    bucket: Bucket
    name: str
    seconds: float
    draft: Draft
    leaves: Sequence[Any]

    def done(self, graph: Graph, seconds: float) -> CompiledGraph:
        return _line(self.bucket, self.name, self.seconds + seconds, graph)


def _line(bucket: Bucket, name: str, seconds: float, graph: Graph) -> CompiledGraph:
    return CompiledGraph(bucket=bucket, name=name, n_operators=graph.n_operators, seconds=seconds, graph=graph)


class _Workshop(ExitStack):
    """Graphs of one ``compile_step``: those that are there, those to be compiled, and the helpers for these."""

    def __init__(self, model: Model, total: int, progress: Progress) -> None:
        super().__init__()
        self._model, self._total, self._progress = model, total, progress
        self._graphs = dict[Any, CompiledGraph]()
        self._pending = dict[Any, _Pending]()
        self._helpers = list[Helper]()
        progress(0, total)

    def graph_of(
        self,
        bucket: Bucket,
        layout: KVLayout,
        key: Any,
        name: str,
        function: Callable[..., Any],
        parts: Sequence[_Flat],
        n_free: int,
    ) -> Graph | Draft:
        """Load or trace a graph when it is first asked for."""
        if key in self._graphs:
            return self._graphs[key].graph
        if key in self._pending:
            return self._pending[key].draft
        model, start = self._model, time.perf_counter()
        found = draft_graph(
            function,
            [argument for part in parts for argument in part.tree],
            dict.fromkeys(range(n_free), 0),
            about=(key, model.config, model.numerics, model.dtype, layout),
            is_fused=not model.numerics.invariant,
        )
        seconds = time.perf_counter() - start
        if isinstance(found, Draft):
            if not self._helpers:  # they take seconds to start, in which the rest is traced
                n_helpers = min(torch.get_num_threads() - 1, MOST_HELPERS)
                self._helpers += [self.enter_context(Helper()) for _ in range(n_helpers)]
            leaves = [leaf for part in parts for leaf in part.leaves]
            self._pending[key] = _Pending(bucket=bucket, name=name, seconds=seconds, draft=found, leaves=leaves)
        else:
            self._graphs[key] = _line(bucket, name, seconds, found)
            self._progress(len(self._graphs), self._total)
        return found

    def finish(self) -> dict[Any, CompiledGraph]:
        """Compile what is pending."""
        n_done, pending = len(self._graphs), self._pending
        compiled = compile_drafts(
            [one.draft for one in pending.values()],
            self._helpers,
            lambda n: self._progress(n_done + n, self._total),
            self._run_experts,
        )
        new = {key: one.done(*done) for (key, one), done in zip(pending.items(), compiled, strict=True)}
        return self._graphs | new

    def _run_experts(self) -> None:
        for one in self._pending.values():
            if one.name.startswith("experts"):
                one.draft.run(one.leaves)


def _weights(model: Model, buckets: Sequence[Bucket]) -> dict[Bucket, _Weights]:
    """Choose the weights of every bucket: graphs of few rows read them as they are."""
    own = _Weights.of(model, model.params)
    is_packing = model.device.type == "cpu" and not model.numerics.invariant
    many = [bucket for bucket in buckets if is_packing and packs_weights(model, bucket.rows)]
    found = dict.fromkeys(buckets, own)
    if many:
        params = packed_params(model)
        found |= dict.fromkeys(many, _Weights.of(model, params))
        stacks = [bucket for bucket in many if packs_experts(model, bucket.rows)]
        if stacks:
            found |= dict.fromkeys(stacks, _Weights.of(model, pack_experts(params)))
    return found


def _require_plain(model: Model) -> None:
    reasons = {
        "kernels of this package": model.ops.paged is None,
        "one rank": model.ranks.world.size == 1,
        "weights that are expanded": not has_stored(model.params),
    }
    missing = [reason for reason, holds in reasons.items() if not holds]
    if missing:
        raise ConfigError(
            f"compile_step: expected a model with {' and '.join(missing)}, got another; decode_step runs it, and "
            "Ascend kernels have capture_decode",
            field="model",
            expected=missing,
        )


def _count(model: Model, buckets: Sequence[Bucket], caches: CacheForm) -> int:
    ratios = set(model.config.compress_ratios)
    routers = {p.ffn.tid2eid is not None for p in model.params.layers}
    # Online pooling folds every token alike, whether or not its group closes.
    n_attention = len(ratios) + (C128_RATIO in ratios and not caches.endswith("online"))
    return len({one.rows for one in buckets}) * (3 + len(routers)) + len(buckets) * n_attention


def _example(model: Model, page_size: int, caches: CacheForm, length: int) -> tuple[KVState, ForwardBatch]:
    """Prepare a decode to the given length in a state of its own."""
    capacity = Capacity(requests=1, tokens=C128_RATIO + page_size, context=C128_RATIO + page_size)
    state = init_state(model, capacity, page_size=page_size, caches=caches)
    state, request = open_request(state, SamplingParams(ignore_eos=True))
    if length > 1:
        state, _ = prepare_extend(state, {request: np.zeros(length - 1, np.int64)})
        state, _ = commit(state, None)
    state, batch = prepare_decode(state, force={request: 0})
    return state.kv, forward_batch(state, batch, rowwise=model.numerics.invariant)


@attrs.frozen(eq=False)
class _Flat:
    """Arguments and their leaves, so that weights are taken apart once and not in every step."""

    tree: Sequence[Any]
    leaves: Sequence[Any]

    @classmethod
    def of(cls, *tree: Any) -> _Flat:
        return cls(tree, pytree.tree_leaves(tree))

    @classmethod
    def plain(cls, *tensors: Tensor) -> _Flat:
        return cls(tensors, tensors)


@attrs.frozen(eq=False, kw_only=True)
class _LayerWeights:
    """What the four graphs of a layer take of its weights."""

    hc_attn: _Flat
    attn: _Flat
    hc_ffn: _Flat
    ffn: _Flat
    has_table: bool

    @classmethod
    def of(cls, p: LayerParams) -> _LayerWeights:
        return cls(
            hc_attn=_Flat.of(p.hc_attn, p.attn_norm),
            attn=_Flat.of(p.attn),
            hc_ffn=_Flat.of(p.hc_ffn, p.ffn_norm),
            ffn=_Flat.of(p.ffn),
            has_table=p.ffn.tid2eid is not None,
        )

    @property
    def leaves(self) -> list[Any]:
        """All of them."""
        return [leaf for part in (self.hc_attn, self.attn, self.hc_ffn, self.ffn) for leaf in part.leaves]


@attrs.frozen(eq=False, kw_only=True)
class _Weights:
    """What the graphs of a model take of its weights."""

    inputs: _Flat
    layers: Sequence[_LayerWeights]
    head: _Flat

    @property
    def leaves(self) -> list[Any]:
        """All of them."""
        return [*self.inputs.leaves, *chain.from_iterable(one.leaves for one in self.layers), *self.head.leaves]

    @classmethod
    def of(cls, model: Model, p: Params) -> _Weights:
        return cls(
            inputs=_Flat.of(p.embed, model.frequencies),
            layers=[_LayerWeights.of(one) for one in p.layers],
            head=_Flat.of(p.hc_head, p.norm, p.head),
        )


GraphOf = Callable[..., Graph | Draft]
"""(key, name, function, arguments, free axes) -> the graph; one that exists is only looked up."""


def _decode(
    model: Model, weights: _Weights, graph_of: GraphOf, kv: KVState, view: ForwardBatch, bucket: Bucket
) -> tuple[KVState, Tensor]:
    """Pad a decode to its bucket and run it inside a write: (caches with its rows written, f32[B,V])."""
    padded = pad_decode(view, bucket, kv.layout, model.config.sliding_window)
    layers = range(model.config.num_hidden_layers)
    with kv.handle.write(write_rows(kv.layout, padded.metadata, layers)) as write:
        logits = _run(model, weights, graph_of, write.tensors, kv.layout, padded, bucket)
    return attrs.evolve(kv, handle=write.handle), logits[: view.batch_size]


def _run(
    model: Model,
    weights: _Weights,
    graph_of: GraphOf,
    buffers: Mapping[str, Tensor],
    layout: KVLayout,
    batch: ForwardBatch,
    bucket: Bucket,
) -> Tensor:
    """Run a padded decode by graphs: f32[B,V]."""
    n_rows, closes = bucket.rows, _closes(batch)

    def run(key: Any, name: str, function: Callable[..., Any], *parts: _Flat, n_free: int = 0) -> Sequence[Tensor]:
        graph = graph_of(key, name, function, parts, n_free)
        return graph(list(chain.from_iterable([part.leaves for part in parts])))

    step = _Flat.of(batch)
    live, streams, y, post, comb, *turns = run(("inputs", n_rows), "inputs", _inputs(model), weights.inputs, step)
    factors, tokens = _Flat(turns, turns), (batch.input_ids, live)
    mix, experts, head = _mixer(model), _experts(model), _head(model)
    every_rows = layer_rows(buffers, layout)
    for ratio, rows, params in zip(layout.kinds, every_rows, weights.layers, strict=True):
        stream = _Flat.plain(streams, y, post, comb)
        streams, x, post, comb = run(("streams", n_rows), "streams", mix, params.hc_attn, stream)
        is_closing = closes and ratio == C128_RATIO
        (y,) = run(
            ("attention", n_rows, bucket.context, ratio, is_closing),
            f"attention {ratio}" + (", closing" if is_closing else ""),
            _attention(model, ratio, layout),
            _Flat((rows,), [*rows.values()]),
            params.attn,
            _Flat.plain(x),
            step,
            factors,
            n_free=len(rows),
        )
        stream = _Flat.plain(streams, y, post, comb)
        streams, x, post, comb = run(("streams", n_rows), "streams", mix, params.hc_ffn, stream)
        name = "experts, by token id" if params.has_table else "experts, by score"
        (y,) = run(("experts", n_rows, params.has_table), name, experts, params.ffn, _Flat.plain(x, *tokens))
    (logits,) = run(("head", n_rows), "head", head, weights.head, _Flat.plain(streams, y, post, comb))
    return logits


def _closes(batch: ForwardBatch) -> bool:
    plan = batch.metadata.compressors.get(C128_RATIO)
    return plan is not None and plan.out_loc.shape[0] > 0


def _inputs(model: Model) -> Callable[..., Any]:
    """Compute what all layers read, and an output and mixes that leave the first streams as they are."""

    def start(embed: Tensor, frequencies: Mapping[int, Tensor], batch: ForwardBatch) -> Any:
        own = attrs.evolve(model, params=attrs.evolve(model.params, embed=embed))
        live = batch.metadata.swa_loc > 0  # slot 0 is the sink
        streams = embed_tokens(own, batch).streams.contiguous()
        n_rows, n_streams, width = streams.shape
        comb = torch.eye(n_streams, device=streams.device).expand(n_rows, -1, -1).contiguous()
        nothing = streams.new_zeros(n_rows, width), comb.new_zeros(n_rows, n_streams), comb
        found = rotations(model, frequencies, batch)
        return live, streams, *nothing, *[found[key] for key in _turn_keys(frequencies)]

    return start


def _turn_keys(ratios: Collection[int]) -> list[tuple[int, str]]:
    """Name the different rotations of a step in a fixed order: both kinds that compress turn their tokens alike."""
    kinds = [ratio for ratio in ratios if ratio != C128_RATIO or C4_RATIO not in ratios]
    return [*((ratio, "tokens") for ratio in kinds), *((ratio, "entries") for ratio in ratios if ratio)]


def _named_turns(ratios: Collection[int], leaves: Sequence[Tensor]) -> dict[tuple[int, str], Any]:
    """Name what the first graph returned: one complex tensor a rotation, or two real ones."""
    keys = _turn_keys(ratios)
    is_whole = len(leaves) == len(keys)
    found = leaves if is_whole else [Turns(*pair) for pair in zip(leaves[::2], leaves[1::2], strict=True)]
    named: dict[tuple[int, str], Any] = dict(zip(keys, found, strict=True))
    return {**named, (C128_RATIO, "tokens"): named[C4_RATIO, "tokens"]} if C4_RATIO in ratios else named


def _mixer(model: Model) -> Callable[..., Any]:
    def mix(p: StreamParams, norm: Tensor, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Any:
        streams = model.ops.update_streams(streams, y, post, comb)
        return streams, *sublayer_input(model, p, norm, streams)

    return mix


def _attention(model: Model, ratio: int, layout: KVLayout) -> Callable[..., Tensor]:
    def attend(rows: Mapping[str, Tensor], p: AttentionParams, x: Tensor, batch: ForwardBatch, *turns: Any) -> Tensor:
        return paged_attention(model, ratio, p, x, rows, layout, batch, _named_turns(model.frequencies, turns))

    return attend


def _experts(model: Model) -> Callable[..., Tensor]:
    def run(p: MoEParams, x: Tensor, token_ids: Tensor, live: Tensor) -> Tensor:
        def follow(stage: str, chosen: Tensor) -> Tensor:
            # Idle rows follow the first, so that nobody's experts are read for them.
            return torch.where(live.unsqueeze(-1), chosen, chosen[:1]) if stage == "ffn.expert_ids" else chosen

        return mixture(model, p, x, token_ids, follow)

    return run


def _head(model: Model) -> Callable[..., Tensor]:
    def run(
        hc_head: StreamParams, norm: Tensor, head: Any, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor
    ) -> Tensor:
        own = attrs.evolve(model, params=attrs.evolve(model.params, hc_head=hc_head, norm=norm, head=head))
        return head_logits(own, model.ops.update_streams(streams, y, post, comb))

    return run
