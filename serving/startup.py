"""What ``purestep serve`` does around the server: says where the memory goes, listens, and stops when told to."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Mapping
from typing import Any

import typer
from rich.table import Table
from torch import Tensor
from torch.utils import _pytree as pytree

from ..model.model import Model
from ..model.scratch import step_scratch
from ..step.compiled import CompiledStep
from .engine import Engine, EngineLimits
from .info import show_bytes
from .protocol_site import Settings
from .rank_engine import RankedEngine
from .server import build_app, serve

__all__ = ["log_line", "memory_table", "run_server"]


async def run_server(
    model: Model,
    limits: EngineLimits,
    settings: Settings,
    *,
    host: str,
    port: int,
    show: Callable[[Table], None],
    compiled: CompiledStep | None = None,
) -> None:
    """Serve a model until the process is told to stop.

    Args:
        model: the model, with a tokenizer.
        limits: of the engine.
        settings: of the server.
        host: address to listen on.
        port: 0 takes a free one.
        show: takes the table of what memory goes where.
        compiled: what steps that only decode run in, where they fit; on one rank.
    """
    one_rank = model.ranks.world.size == 1
    engine = Engine(model, limits, compiled=compiled) if one_rank else RankedEngine(model, limits)
    app = build_app(model, engine, settings)
    show(memory_table(model, limits, engine.status().pool_bytes, 0 if compiled is None else compiled.n_bytes))
    until, loop = asyncio.Event(), asyncio.get_running_loop()

    def stop() -> None:
        # Whoever asks a second time means at once.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        typer.echo(f"stopping; running requests have {settings.drain_seconds:g} seconds to end", err=True)
        until.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    await serve(
        app,
        host=host,
        port=port,
        until=until,
        ready=lambda address: typer.echo(f"serving {settings.name!r} at {address}", err=True),
    )


def memory_table(model: Model, limits: EngineLimits, pool_bytes: Mapping[str, int], n_copied: int = 0) -> Table:
    """Show what memory goes where.

    Args:
        model: the model.
        limits: of the engine.
        pool_bytes: cache buffer -> bytes.
        n_copied: bytes of the weights that compiled steps have copies of.
    """
    weights = sum(leaf.nbytes for leaf in pytree.tree_leaves(model.params) if isinstance(leaf, Tensor))
    table = Table(title="Memory", title_justify="left")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("for")
    table.add_row("weights", show_bytes(weights), str(model.dtype).removeprefix("torch."))
    if n_copied:
        table.add_row("weights in another layout", show_bytes(n_copied), "compiled steps")
    reach = f"{limits.tokens:,} tokens, {limits.running} requests, {limits.points} reusable prefixes"
    for name, size in pool_bytes.items():
        table.add_row(f"cache {name}", show_bytes(size), reach if name == next(iter(pool_bytes)) else "")
    context = min(limits.context, limits.tokens)
    scratch = step_scratch(
        model.config,
        model.dtype,
        tokens=limits.budget,
        rows=limits.running,
        context=context,
        form=limits.caches or model.cache_form,
        rounds_activations=model.rounds_activations,
    )
    table.add_row("scratch of a step, at most", show_bytes(scratch), f"{limits.budget:,} tokens a step")
    total = weights + n_copied + sum(pool_bytes.values()) + scratch
    table.add_row("in all", show_bytes(total), f"context {context:,} tokens")
    table.caption, table.caption_justify = _reuse_line(limits), "left"
    return table


def _reuse_line(limits: EngineLimits) -> str:
    """Say which prefixes are reused, so that nobody waits for a hit that cannot come."""
    if not limits.points:
        return "Prefixes are not reused."
    if not limits.reuses:
        return (
            f"Warning: prefixes are never reused: the smallest has {limits.reuse_unit:,} tokens (page size and 128), "
            f"a request at most {min(limits.context, limits.tokens):,}."
        )
    return f"Prefixes are reused from {limits.reuse_unit:,} tokens on, in multiples of that."


def log_line(record: Mapping[str, Any]) -> None:
    """Write one request's record as a line of JSON to standard error."""
    typer.echo(json.dumps(record, ensure_ascii=False), err=True)
