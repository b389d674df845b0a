"""Where the time of a decode step goes: the host's part, and every stage of every kind of layer.

The model calls a tap at the end of each stage (``model/stages.py``), so the time between two calls is what the later
stage took. Nothing in the model knows of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import attrs
import torch
from rich.table import Table
from torch import Tensor
from torch.profiler import profile

from ..model.forward import forward
from ..model.model import Model
from ..model.stages import split_name
from ..state.capacity import C4_RATIO, C128_RATIO, Capacity
from ..state.decode import DecodeState
from ..state.errors import CapacityError, RequestError
from ..state.sampling import SamplingParams
from ..step.commit import commit
from ..step.decode import decode_step
from ..step.extend import extend_step
from ..step.forward_batch import forward_batch
from ..step.prepare import prepare_decode
from ..step.relay import relay
from ..step.requests import init_state, open_request
from ..step.sample import sample

__all__ = ["StageTime", "StepProfile", "filled_state", "profile_step", "profile_table", "write_trace"]

Progress = Callable[[int, int], None]

_PAGE_SIZE: Final = 128

_CHUNK: Final = 512
"""Prompt tokens of a request that one step feeds."""

_SEED: Final = 0

_KINDS: Final[Mapping[int, str]] = {0: "window", C4_RATIO: "C4", C128_RATIO: "C128"}

_PARTS: Final[Mapping[str, str]] = {
    "prepare": "slots, lengths, request table",
    "forward_batch": "inputs, positions, page tables",
    "streams": "embedding; joining the residual streams after the experts",
    "attn.input": "mixing the streams, norm",
    "attn.picks": "projections, cache writes, compressors, indexer",
    "attn.heads": "attention; where nothing is picked also projections, cache writes, compressor",
    "attn.output": "output projection",
    "ffn.streams": "joining the residual streams",
    "ffn.input": "mixing the streams, norm",
    "ffn.router_logits": "router",
    "ffn.expert_ids": "choice of experts",
    "ffn.expert_weights": "their weights",
    "ffn.output": "routed and shared experts",
    "final.streams": "joining the residual streams after the last layer",
    "head": "last mix, norm, logits",
    "sample": "choice of the tokens",
    "commit": "relay, token logs, who has finished",
}
"""What each part of a step does, in its order."""


@attrs.frozen(kw_only=True)
class StageTime:
    """One part of a step.

    Attributes:
        name: of the stage, or of what happens around the model.
        kind: of the layers that it belongs to; empty outside the layers.
        calls: times a step.
        ms: all of them together, the median over the steps.
    """

    name: str
    kind: str
    calls: int
    ms: float


@attrs.frozen(kw_only=True)
class StepProfile:
    """Where a step's time went.

    Attributes:
        batch: requests.
        context: tokens of each of them before the first step.
        steps: that were measured.
        ms: a whole step, the median.
        stages: in the order of a step, then by kind of layer.
    """

    batch: int
    context: int
    steps: int
    ms: float
    stages: tuple[StageTime, ...]

    @property
    def host_share(self) -> float:
        """Share of the step that is spent around the model."""
        around = ("prepare", "forward_batch", "sample", "commit")
        return sum(stage.ms for stage in self.stages if stage.name in around) / self.ms


def filled_state(
    model: Model, batch: int, context: int, *, room: int, progress: Progress = lambda done, total: None
) -> DecodeState:
    """Open requests and feed each of them random tokens.

    Args:
        model: the model.
        batch: requests.
        context: tokens of each.
        room: tokens that each can grow by.
        progress: told how many tokens have been fed, of how many.
    Raises:
        RequestError: no request, no token, or more than the model's context holds.
        CapacityError: there is no memory for the pools.
    """
    longest = model.config.max_position_embeddings
    for field, got, least, most in (("batch", batch, 1, None), ("context", context, 1, longest - room)):
        if got < least or (most is not None and got > most):
            bound = f"at least {least}" if most is None else f"{least} to {most} ({longest} less the steps)"
            raise RequestError(f"{field}: expected {bound}, got {got}", field=field, expected=bound, got=got)
    tokens = batch * (context + room + _PAGE_SIZE)
    try:
        state = init_state(model, Capacity(requests=batch, tokens=tokens, context=context + room))
    except (RuntimeError, MemoryError) as error:
        raise CapacityError(
            f"profile: there is no memory for pools of {tokens:,} tokens ({error}); ask for a smaller batch or context",
            field="context",
            got=tokens,
        ) from error
    generator = torch.Generator().manual_seed(_SEED)
    for done in range(batch):
        state, request = open_request(state, SamplingParams(temperature=0, ignore_eos=True))
        ids = torch.randint(model.config.vocab_size, (context,), generator=generator)
        for start in range(0, context, _CHUNK):
            chunk = ids[start : start + _CHUNK]
            state, _ = extend_step(model, state, {request: chunk}, sample=start + len(chunk) == context)
            progress(done * context + start + len(chunk), batch * context)
    return state


class _Clock:
    """Adds up what lies between one mark and the next, by the name of the later one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spent: dict[str, list[float]] = {}
        self.last = self._now()

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def mark(self, name: str, x: Tensor | None = None) -> Tensor | None:
        """End the part of this name; also a tap."""
        now = self._now()
        self.spent.setdefault(name, []).append(now - self.last)
        self.last = self._now()
        return x


@torch.no_grad()
def _timed_step(model: Model, state: DecodeState) -> tuple[DecodeState, dict[str, list[float]]]:
    """Make the step of ``decode_step`` piece by piece, with a clock between the pieces."""
    clock = _Clock(model.device)

    def tap(name: str, x: Tensor) -> Tensor:
        clock.mark(name)
        return x

    state, batch = prepare_decode(state)
    clock.mark("prepare")
    view = forward_batch(state, batch, rowwise=model.numerics.invariant)
    clock.mark("forward_batch")
    kv, logits = forward(model, state.kv, view, tap=tap)
    clock.mark("head")
    stops = model.config.eos_token_id
    sampling, ids = sample(logits, state.sampling, batch.request_ids, view.seq_lens - 1, stop_token_ids=stops)
    clock.mark("sample")
    state = relay(attrs.evolve(state, kv=kv, sampling=sampling), batch, ids)
    state, _ = commit(state, ids)
    clock.mark("commit")
    return state, clock.spent


def profile_step(model: Model, state: DecodeState, steps: int, *, warmup: int = 2) -> StepProfile:
    """Decode for some steps and say where the time of one goes.

    Args:
        model: the model.
        state: whose running requests decode; it keeps its content.
        steps: that are measured, at least 1.
        warmup: steps before them.
    Raises:
        RequestError: fewer than one step.
    """
    if steps < 1:
        raise RequestError(f"steps: expected at least 1, got {steps}", field="steps", expected=">= 1", got=steps)
    context = len(state.requests[0].tokens) - 1
    spent: list[dict[str, list[float]]] = []
    for _ in range(warmup + steps):
        state, one = _timed_step(model, state)
        spent.append(one)
    kinds = model.config.compress_ratios
    grouped = [_by_kind(one, kinds) for one in spent[warmup:]]
    parts, kinds_order = list(_PARTS), ["", *_KINDS.values()]
    keys = sorted(grouped[0], key=lambda key: (parts.index(key[0]), kinds_order.index(key[1])))
    stages = tuple(
        StageTime(
            name=name,
            kind=kind,
            calls=len(grouped[0][name, kind]),
            ms=statistics.median(sum(one[name, kind]) for one in grouped) * 1e3,
        )
        for name, kind in keys
    )
    whole = statistics.median(sum(sum(times) for times in one.values()) for one in grouped) * 1e3
    return StepProfile(batch=len(state.requests), context=context, steps=steps, ms=whole, stages=stages)


def _by_kind(spent: Mapping[str, list[float]], kinds: tuple[int, ...]) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for full, times in spent.items():
        layer, name = split_name(full)
        kind = "" if layer is None else _KINDS[kinds[layer]]
        found.setdefault((name, kind), []).extend(times)
    return found


def profile_table(found: StepProfile) -> Table:
    """Lay a profile out for people, the largest parts marked."""
    title = f"One decode step of {found.batch} requests at {found.context:,} tokens: {found.ms:.2f} ms"
    table = Table(title=title, caption=f"{found.host_share:.0%} around the model; medians of {found.steps} steps")
    for name in ("stage", "layers"):
        table.add_column(name, no_wrap=True)
    for name in ("calls", "ms"):
        table.add_column(name, justify="right")
    table.add_column("share", no_wrap=True)
    table.add_column("what")
    for stage in found.stages:
        share = stage.ms / found.ms
        bar = f"{share:5.1%} " + "█" * round(share * 40)
        table.add_row(stage.name, stage.kind, str(stage.calls), f"{stage.ms:.3f}", bar, _PARTS[stage.name])
    return table


def write_trace(model: Model, state: DecodeState, path: Path) -> None:
    """Record every operator of one step in the format that chrome://tracing and Perfetto read.

    Args:
        model: the model.
        state: whose running requests decode.
        path: of the file.
    """
    with profile(record_shapes=True) as record:
        decode_step(model, state)
    record.export_chrome_trace(str(path))
