"""``purestep bench``: milliseconds a decode step, beside transformers and beside what the machine allows.

Every (batch, context) alternates the engines step by step in one process and measures the machine just before, because
a shared machine drifts from minute to minute: read ratios, not milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import attrs
from rich.table import Table

from ..model.loading import load_model
from ..model.model import Model
from ..state.errors import ConfigError
from ..state.numerics import Numerics
from ..step.compiled import compile_step
from ..step.decode import decode_step
from .bench_cases import CASES, floor_of, probe_machine
from .bench_steps import DTYPES, alternate, laid_state, median_ms, our_step, write_case

__all__ = ["Timing", "bench_table", "draw_timings", "time_decode"]

Progress = Callable[[int, int], None]

_ROOM: Final = 8
"""Steps of a request besides those that are measured."""


@attrs.frozen(kw_only=True)
class Timing:
    """What one (batch, context) of one case takes.

    Attributes:
        case: name in ``CASES``.
        dtype: of the weights.
        batch: rows of a step.
        context: tokens that each has before it.
        ms: a step of ours, the median; compiled, unless asked for otherwise.
        eager_ms: of ours without compiling; None where that is ``ms``.
        tokens_per_s: of ours.
        floor_ms: no step of this machine can be faster.
        over_floor: how many times the floor ours takes.
        peer_ms: a step of transformers; None without it.
        speed_up: of ours over it.
        scaled_ms: a step of ours in pools ``pool_scale`` times larger; None unless asked for.
    """

    case: str
    dtype: str
    batch: int
    context: int
    ms: float
    tokens_per_s: float
    floor_ms: float
    over_floor: float
    peer_ms: float | None = None
    speed_up: float | None = None
    eager_ms: float | None = None
    scaled_ms: float | None = None


def time_decode(
    case: str,
    dtype: str,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    rounds: int,
    kernels: str | None = None,
    is_compiled: bool = True,
    has_peer: bool = True,
    pool_scale: int = 1,
    progress: Progress = lambda done, total: None,
) -> Iterator[Timing]:
    """Measure every combination, one after the other.

    Args:
        case: name in ``CASES``.
        dtype: name in ``DTYPES``.
        batches: rows of a step.
        contexts: tokens before them.
        rounds: steps of each engine that are measured.
        kernels: of ours; default the fastest.
        is_compiled: whether ours is compiled, for each combination exactly.
        has_peer: whether transformers runs beside it.
        pool_scale: above 1 also steps ours in pools so many times larger.
        progress: told how many graphs are compiled, then how many combinations are measured, of how many.
    Raises:
        ConfigError: no such case or dtype, or no transformers.
    """
    for field, name, known in (("case", case, CASES), ("dtype", dtype, DTYPES)):
        if name not in known:
            raise ConfigError(f"{field}: expected one of {', '.join(known)}, got {name!r}", field=field, got=name)
    peer_module: Any = _peer_module() if has_peer else None
    with TemporaryDirectory() as folder:
        write_case(CASES[case], dtype, Path(folder))
        model = load_model(folder, dtype=dtype, kernels=kernels, numerics=Numerics.plain())
        peer = None if peer_module is None else peer_module.load_peer(folder, DTYPES[dtype][0])
        total, done = len(batches) * len(contexts), 0
        decode: Callable[..., Any] = decode_step
        if is_compiled:
            shapes = [(batch, context + rounds + _ROOM) for batch in batches for context in contexts]
            decode = compile_step(model, shapes, progress=progress)
        for context in contexts:
            for batch in batches:
                runs = {"ours": _our_run(model, batch, context, rounds, decode)}
                if is_compiled:
                    runs["eager"] = _our_run(model, batch, context, rounds)
                if pool_scale > 1:
                    runs["scaled"] = _our_run(model, batch, context, rounds, decode, pool_scale)
                if peer is not None:
                    runs["peer"] = peer_module.peer_step(peer, batch, context)
                machine = probe_machine(DTYPES[dtype][0])
                times = {name: median_ms(one) for name, one in alternate(runs, rounds).items()}
                floor = machine.floor_ms(floor_of(CASES[case], batch, context, DTYPES[dtype][0].itemsize))
                ours, other = times["ours"], times.get("peer")
                done += 1
                progress(done, total)
                yield Timing(
                    case=case,
                    dtype=dtype,
                    batch=batch,
                    context=context,
                    ms=ours,
                    tokens_per_s=batch / ours * 1e3,
                    floor_ms=floor,
                    over_floor=ours / floor,
                    peer_ms=other,
                    speed_up=None if other is None else other / ours,
                    eager_ms=times.get("eager"),
                    scaled_ms=times.get("scaled"),
                )


def _our_run(
    model: Model,
    batch: int,
    context: int,
    rounds: int,
    decode: Callable[..., Any] = decode_step,
    pool_scale: int = 1,
) -> Callable[[], object]:
    return our_step(model, *laid_state(model, batch, context, room=rounds + _ROOM, pool_scale=pool_scale), decode)


def _peer_module() -> Any:
    try:
        return import_module(".bench_peer", __package__)
    except ImportError as error:
        raise ConfigError(
            f"bench: expected transformers to measure beside, got: {error}; install it with: pip install "
            '".[bench]", or leave it out with --no-peer',
            field="peer",
        ) from error


def bench_table(found: Iterable[Timing], threads: int, rounds: int) -> Table:
    """Lay timings out for people."""
    table = Table(title=f"decode, {threads} threads, medians of {rounds} alternating steps")
    names = [field.name for field in attrs.fields(Timing)]
    rows = [attrs.astuple(one) for one in found]
    kept = [at for at in range(len(names)) if any(row[at] is not None for row in rows)]
    for at in kept:
        table.add_column(names[at], justify="right" if at > 1 else "left")
    for row in rows:
        table.add_row(*(_show(row[at]) for at in kept))
    return table


def _show(number: Any) -> str:
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def draw_timings(found: Sequence[Timing], path: Path) -> None:
    """Draw milliseconds a step against context and against batch, with the floor and the peer.

    Args:
        found: of one case and dtype.
        path: of the picture; its ending says which format.
    Raises:
        ConfigError: matplotlib is not installed, or does not know the format.
    """
    try:
        figure_class = import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ConfigError(
            f'picture: expected matplotlib, got: {error}; install it with: pip install ".[bench]"',
            field="picture",
        ) from error
    figure = figure_class(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(f"{found[0].case}, {found[0].dtype}: one decode step")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, along, by in ((axes[0], "context", "batch"), (axes[1], "batch", "context")):
        for at, fixed in enumerate(sorted({getattr(one, by) for one in found})):
            points = sorted((one for one in found if getattr(one, by) == fixed), key=lambda one: getattr(one, along))
            places, color = [getattr(one, along) for one in points], f"C{at}"
            axis.plot(places, [one.ms for one in points], "o-", color=color, label=f"{by} {fixed:,}")
            if all(one.peer_ms is not None for one in points):
                axis.plot(places, [one.peer_ms for one in points], "x--", color=color, alpha=0.7)
            axis.plot(places, [one.floor_ms for one in points], ":", color=color, alpha=0.7)
        axis.set(xscale="log", yscale="log", xlabel=along)
        marks = sorted({getattr(one, along) for one in found})
        axis.set_xticks(marks, [f"{mark:,}" for mark in marks], minor=False)
        axis.minorticks_off()
        axis.grid(visible=True, which="both", alpha=0.2)
        axis.legend(title="solid ours, dashed transformers, dotted floor", fontsize="small", title_fontsize="small")
    axes[0].set_ylabel("ms a step")
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ConfigError(f"picture: expected a name ending in .png, .svg or .pdf, got {path} ({error})") from error
