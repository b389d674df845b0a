"""A plan as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from ..state.config import Config
from .chips import Chip
from .info import pairs_table, show_bytes
from .plan_step import StepPlan, step_seconds, tokens_that_fit

__all__ = ["plan_tables"]


def plan_tables(plan: StepPlan, config: Config, chip: Chip, chip_name: str) -> Iterator[Table]:
    """Show what a decode step costs on every rank.

    Args:
        plan: of the step.
        config: the model's numbers.
        chip: what a rank runs on.
        chip_name: what it is called.
    """
    layout, caches = plan.parallel, sum(plan.caches.values())
    total = plan.weights + caches + plan.scratch
    rows = [
        ("layout", f"tp={layout.tp} dp={layout.dp} ep={layout.ep}, {layout.ranks} ranks of {chip_name}"),
        ("requests", f"{plan.requests} of each replica, context {plan.context:,}"),
        ("weights", show_bytes(plan.weights)),
        ("caches", show_bytes(caches)),
        ("scratch, at most", show_bytes(plan.scratch)),
        ("in all", f"{show_bytes(total)} of {show_bytes(chip.memory)}"),
        ("context that fits", f"{tokens_that_fit(plan, chip, config):,} tokens for each of these requests"),
        ("FLOPs", f"{plan.flops / 1e9:,.1f} G"),
    ]
    yield pairs_table("Every rank, one decode step", rows)
    yield _collective_table(plan)
    names = ("computing", "reading memory", "sending")
    seconds = step_seconds(plan, chip)
    times = [(name, f"{1e3 * one:.3f} ms") for name, one in zip(names, seconds, strict=True)]
    bound = max(seconds[:2]) + seconds[2]
    yield pairs_table(
        "Time at the chip's peak figures, latencies not counted",
        [*times, ("a step, nothing overlapped but computing and reading", f"{1e3 * bound:.3f} ms")],
    )


def _collective_table(plan: StepPlan) -> Table:
    table = Table(title="Collectives of a step", title_justify="left")
    table.add_column("what")
    for column in ("ranks", "count", "operand bytes", "bytes sent by a rank"):
        table.add_column(column, justify="right")
    for one in plan.collectives:
        table.add_row(one.name, str(one.group), str(one.count), show_bytes(one.operand), show_bytes(one.moved))
    if not plan.collectives:
        table.add_row("none", "", "", "", "")
    return table
