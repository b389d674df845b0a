"""Decode steps of this package to be timed: a model with random weights, caches laid as a prefill leaves them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from ..model.model import Model
from ..model.random_source import RandomSource
from ..model.storage import FORMS, Storage
from ..model.streaming import stream_checkpoint
from ..state.capacity import Capacity
from ..state.config import Config
from ..state.decode import DecodeState
from ..state.sampling import SamplingParams
from ..step.commit import commit
from ..step.decode import decode_step
from ..step.prepare import prepare_extend
from ..step.requests import init_state, open_request

__all__ = ["DTYPES", "alternate", "laid_state", "median_ms", "our_step", "write_case"]

DTYPES: Final[Mapping[str, tuple[torch.dtype, Storage]]] = {
    "float32": (torch.float32, FORMS["f32"]),
    "bfloat16": (torch.bfloat16, FORMS["bf16"]),
}
"""Dtypes that both engines run in, and how their weights are stored."""

_ROOM: Final = 128
"""Slots that a request has beyond its tokens, since it takes whole pages."""


def write_case(config: Config, dtype: str, folder: Path) -> None:
    """Write random weights under the names that both engines read.

    Args:
        config: the numbers of the case.
        dtype: a name in ``DTYPES``.
        folder: to write to.
    """
    storage = DTYPES[dtype][1]
    source = RandomSource(config=config, has_draft=False, storage=storage, seed=0)
    stream_checkpoint(folder, source, storage, dialect="modules")


def laid_state(
    model: Model, batch: int, context: int, *, room: int, pool_scale: int = 1
) -> tuple[DecodeState, tuple[int, ...]]:
    """Open requests whose slots are allocated as by a prefill and whose cache entries are random.

    Args:
        model: the model.
        batch: requests.
        context: tokens of each.
        room: tokens that each can grow by.
        pool_scale: how many times larger the pools are than needed.
    Returns:
        (state, requests).
    """
    longest = context + room
    tokens = batch * (longest + _ROOM)
    state = init_state(model, Capacity(requests=batch, tokens=tokens * pool_scale, context=longest))
    ids = torch.randint(model.config.vocab_size, (batch, context))
    requests = []
    for _ in range(batch):
        state, request = open_request(state, SamplingParams(temperature=0, ignore_eos=True))
        requests.append(request)
    state, _ = prepare_extend(state, dict(zip(requests, ids, strict=True)))
    state, _ = commit(state, None)
    handle, layout = state.kv.handle, state.kv.layout
    live = {name: torch.arange(min(layout.n_slots(name) - 1, tokens + 2 * _ROOM)) for name in handle.names}
    rows = {
        name: (torch.arange(layout.n_layers(name)).unsqueeze(-1) * layout.n_slots(name) + slots).flatten()
        for name, slots in live.items()
    }
    with handle.write(rows) as write:
        for name, at in rows.items():
            buffer = write.tensors[name]
            buffer[at.to(buffer.device)] = torch.randn(len(at), buffer.shape[1]).mul_(0.5).to(buffer)
    return attrs.evolve(state, kv=attrs.evolve(state.kv, handle=write.handle)), tuple(requests)


def our_step(
    model: Model, state: DecodeState, requests: Sequence[int], decode: Callable[..., Any] = decode_step
) -> Callable[[], object]:
    """Make a function that steps a state on with fresh random tokens and keeps only the newest state.

    Args:
        model: the model.
        state: before the first step.
        requests: its rows.
        decode: ``decode_step``, or what ``compile_step`` made of it.
    """
    held = [state]

    def step() -> object:
        tokens = torch.randint(model.config.vocab_size, (len(requests),)).tolist()
        held[0], out = decode(model, held[0], force=dict(zip(requests, tokens, strict=True)))
        return out

    return step


def alternate(runs: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Call every function once a round, in turns, because a shared machine drifts; seconds by name."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warmup + rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def median_ms(seconds: Sequence[float]) -> float:
    """Median in milliseconds."""
    return statistics.median(seconds) * 1e3
