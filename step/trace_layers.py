"""The device half of a traced step: what every layer does with the token rows, and which cache rows it touches.

Cache rows follow from the step's own index tensors and tables; which experts and entries were chosen comes from what
the step captured.

Source: none; the order is that of ``model/layer.py`` and ``model/paged.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from ..state.batch import ForwardBatch
from ..state.capacity import C4_RATIO, C128_PAGE, C128_RATIO
from ..state.captured import Captured
from ..state.config import Config
from ..state.ledger import Holding
from .trace_stages import StageWriter
from .trace_tables import HostView, access, ints, touched
from .trace_values import Access, Choice, ExpertRows, TraceStage

__all__ = ["CAPTURED", "LayerView"]

Ints = NDArray[np.int64]

CAPTURED: Final = ("attn.picks", "ffn.expert_ids", "ffn.expert_weights")
"""Stages that a trace has to look into; everything else follows from the tables."""

_DISPATCH: Final = "token -> expert: rows are grouped by expert; one rank owns all, so none is sent"
_COMBINE: Final = "expert -> token: every row is back with its request"


@attrs.frozen(eq=False, kw_only=True)
class LayerView:
    """The device half of one step.

    Attributes:
        config: the model's numbers.
        host: the other half.
        view: what the model saw.
        captured: what the step captured of ``CAPTURED``.
        writer: of stages.
    """

    config: Config
    host: HostView
    view: ForwardBatch
    captured: Captured
    writer: StageWriter

    def stages(self, layer: int) -> Iterator[TraceStage]:
        """Describe the stages of one layer, in order."""
        yield from self._attention(layer)
        yield from self._experts(layer)

    def _attention(self, i: int) -> Iterator[TraceStage]:
        stage, ratio = self.writer.stage, self.config.layer_ratio(i)
        yield stage("attn.mix", "The streams are mixed to one row per token, and normed.", _JOIN, layer=i)
        yield stage(
            "attn.query",
            "Low-rank query, then query heads, turned by the token's position.",
            ("float[T,H]", "float[T,Q]", "float[T,N,D]"),
            layer=i,
        )
        yield stage(
            "attn.window",
            "The token's own entry, key and value in one, goes to its window slot: only now does it exist.",
            ("float[T,H]", "float[T,D]"),
            layer=i,
            writes=self._window_writes(i),
        )
        if ratio:
            yield self._compress(i, ratio)
        if ratio == C4_RATIO:
            yield self._pick(i)
        yield self._read(i, ratio)
        yield stage(
            "attn.update",
            "Heads are turned back and projected; the row is mixed back into the streams.",
            ("float[T,N,D]", "float[T,H]", "float[T,M,H]"),
            layer=i,
        )

    def _window_writes(self, i: int) -> tuple[Access, ...]:
        found = []
        for old, new in self.host.rows:
            positions = np.arange(old.request.kv_len, new.request.kv_len)
            found.append(_cache("swa", i, new, positions, new.windows[positions]))
        return touched(found)

    def _compress(self, i: int, ratio: int) -> TraceStage:
        names = ("c4", "index") if ratio == C4_RATIO else ("c128",)
        reads, states = self._state_reads(ratio), self._state_writes(ratio)
        entries = [
            _cache("", i, new, ends, _entry_slots(new, ratio, ends))
            for old, new in self.host.rows
            if len(ends := _ends(ratio, old.request.kv_len // ratio, new.request.kv_len // ratio))
        ]
        return self.writer.stage(
            "attn.compress",
            f"Each token leaves a state row; one that ends a group of {ratio} pools the group into an entry.",
            ("float[T,H]", "float[C,D]"),
            layer=i,
            reads=[_named(one, f"{name}_state", i) for name in names for one in reads],
            writes=[_named(one, f"{name}_state", i) for name in names for one in states]
            + [_named(one, name, i) for name in names for one in entries],
            extra={"C": sum(len(one.slots) for one in entries)},
        )

    def _state_reads(self, ratio: int) -> list[Access]:
        """List the state rows that closing groups were pooled from, but for the tokens of this step."""
        plan = self.view.metadata.compressors[ratio]
        history, members = _host(plan.history), _host(plan.members)
        closing = [row for row, position in enumerate(self.writer.positions) if position % ratio == ratio - 1]
        found: dict[int, dict[int, int]] = {}
        for row, own in zip(closing, members, strict=True):
            past = self.writer.positions[row] - np.arange(len(own) - 1, -1, -1)
            is_old = own < len(history)
            slots = found.setdefault(self.writer.request_ids[row], {})
            slots.update(zip(past[is_old].tolist(), history[own[is_old]].tolist(), strict=True))
        return [access("", request_id, at.values(), positions=at) for request_id, at in found.items() if at]

    def _state_writes(self, ratio: int) -> list[Access]:
        plan = self.view.metadata.compressors[ratio]
        found: dict[int, dict[int, int]] = {}
        for row, slot in zip(_host(plan.keep).tolist(), _host(plan.state_loc).tolist(), strict=True):
            found.setdefault(self.writer.request_ids[row], {})[self.writer.positions[row]] = slot
        return [access("", request_id, at.values(), positions=at) for request_id, at in found.items()]

    def _pick(self, i: int) -> TraceStage:
        choices = [
            Choice(
                request_id=request_id,
                position=position,
                n_candidates=(position + 1) // C4_RATIO,
                ids=tuple(pick for pick in picks if pick >= 0),
                weights=(),
            )
            for request_id, position, picks in zip(
                self.writer.request_ids, self.writer.positions, self._captured(i, "attn.picks").tolist(), strict=True
            )
        ]
        reads, is_choosing = [], False
        for _, new in self.host.rows:
            n_visible = new.request.kv_len // C4_RATIO
            if n_visible > self.config.index_topk:
                is_choosing = True
                ends = _ends(C4_RATIO, 0, n_visible)
                reads.append(_cache("index", i, new, ends, _entry_slots(new, C4_RATIO, ends)))
        title = f"The indexer scores all entries and picks {self.config.index_topk} for every token."
        if not is_choosing:
            title = f"At most {self.config.index_topk} entries: every token reads all it can see, nothing is scored."
        return self.writer.stage("attn.pick", title, ("float[T,H]", "i64[T,P]"), layer=i, reads=reads, choices=choices)

    def _read(self, i: int, ratio: int) -> TraceStage:
        found, window = [], self.config.sliding_window
        for old, new in self.host.rows:
            positions = np.arange(max(0, old.request.kv_len - window + 1), new.request.kv_len)
            found.append(_cache("swa", i, new, positions, new.windows[positions]))
        if ratio:
            name = "c4" if ratio == C4_RATIO else "c128"
            for old, new in self.host.rows:
                ends = self._read_ends(i, ratio, old, new)
                found.append(_cache(name, i, new, ends, _entry_slots(new, ratio, ends)))
        kinds = {0: "the window", C4_RATIO: "the window and the picked entries of 4 tokens"}
        what = kinds.get(ratio, "the window and every entry of 128 tokens")
        return self.writer.stage(
            "attn.read",
            f"Queries attend to {what}; one learnt sink logit a head joins the softmax and has no value.",
            ("float[T,N,D]", "float[T,N,D]"),
            layer=i,
            reads=touched(found),
        )

    def _read_ends(self, i: int, ratio: int, old: Holding, new: Holding) -> Ints:
        """List the last positions of the groups that the request's tokens read."""
        if ratio != C4_RATIO:
            return _ends(ratio, 0, new.request.kv_len // ratio)
        rows = [row for row, owner in enumerate(self.writer.request_ids) if owner == new.request.request_id]
        picks = np.unique(self._captured(i, "attn.picks")[rows])
        return picks[picks >= 0] * ratio + ratio - 1

    def _experts(self, i: int) -> Iterator[TraceStage]:
        stage, config = self.writer.stage, self.config
        ids, weights = self._captured(i, "ffn.expert_ids"), self._captured(i, "ffn.expert_weights")
        yield stage("ffn.mix", "The streams are mixed to one row per token, and normed.", _JOIN, layer=i)
        how = "its token id, by a table" if config.is_hash(i) else "its scores"
        yield stage(
            "ffn.route",
            f"The router scores all experts; each token gets {config.num_experts_per_tok} of them by {how}.",
            ("float[T,H]", "f32[T,E]", "i64[T,K]"),
            layer=i,
            choices=[
                Choice(
                    request_id=request_id,
                    position=position,
                    n_candidates=config.n_routed_experts,
                    ids=ints(chosen),
                    weights=tuple(float(weight) for weight in weighed),
                )
                for request_id, position, chosen, weighed in zip(
                    self.writer.request_ids, self.writer.positions, ids, weights, strict=True
                )
            ],
        )
        yield stage(
            "ffn.dispatch",
            "Every row goes to its experts: rows of several requests may meet at one.",
            ("float[T,H]", "float[T*K,H]"),
            layer=i,
            ownership=_DISPATCH,
            experts=[
                ExpertRows(expert_id=int(expert), rows=ints(np.flatnonzero((ids == expert).any(-1))))
                for expert in np.unique(ids)
            ],
        )
        yield stage(
            "ffn.combine",
            "Weighted results of a token's experts are summed, and the shared expert's is added.",
            ("float[T*K,H]", "float[T,H]"),
            layer=i,
            ownership=_COMBINE,
        )
        yield stage("ffn.update", "The row is mixed back into the streams.", ("float[T,H]", "float[T,M,H]"), layer=i)

    def _captured(self, layer: int, stage: str) -> NDArray[Any]:
        return _host(self.captured.stages[f"{layer}.{stage}"])


_JOIN: Final = ("float[T,M,H]", "float[T,H]")


def _host(tensor: Any) -> NDArray[Any]:
    found: NDArray[Any] = tensor.cpu().numpy()
    return found


def _ends(ratio: int, first: int, last: int) -> Ints:
    """Return the last position of groups ``first`` to ``last - 1``."""
    return np.arange(first, last) * ratio + ratio - 1


def _entry_slots(holding: Holding, ratio: int, ends: Ints) -> Ints:
    if ratio == C4_RATIO:
        return holding.slots[ends] // C4_RATIO
    groups = ends // C128_RATIO
    return holding.sidecar[groups // C128_PAGE] * C128_PAGE + groups % C128_PAGE


def _cache(store: str, layer: int, holding: Holding, positions: Ints, slots: Ints) -> Access:
    return access(store, holding.request.request_id, slots, layer=layer, positions=positions)


def _named(one: Access, store: str, layer: int) -> Access:
    return attrs.evolve(one, store=store, layer=layer)
