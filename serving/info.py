"""What a model is and what it costs, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import attrs
from rich.markup import escape
from rich.table import Table

from ..model.checkpoint import read_config
from ..model.layout import parameter_count
from ..model.storage import FORMS, Storage
from ..state.capacity import C4_RATIO, C128_RATIO, Capacity
from ..state.config import Config
from ..state.kv import CacheForm
from ..state.released import family_of
from .costs import (
    CacheCost,
    FileReport,
    PartCost,
    active_parameters,
    cache_costs,
    file_report,
    part_costs,
    pool_bytes,
    smallest_layout,
    weight_bytes,
)

__all__ = ["free_memory", "info_tables", "pairs_table", "show_bytes", "show_layers"]

_KINDS: Final[Mapping[int, str]] = {0: "window", C4_RATIO: "window + C4 + indexer", C128_RATIO: "window + C128"}


_LISTED: Final = 10
"""Names of one fault that the table repeats."""

_DEVICES_GIB: Final = (64, 80, 141)
"""Memory of common devices."""


def info_tables(
    folder: Path, *, context: int | None = None, requests: int = 1, form: CacheForm = "plain"
) -> Iterator[Table]:
    """Describe a checkpoint, or a folder with nothing but a ``config.json``.

    Args:
        folder: of the checkpoint.
        context: tokens a request for which caches are sized; default 4096, or all that the model has.
        requests: how many of them.
        form: how caches are stored.
    Raises:
        CheckpointError: no configuration, or damaged files.
        ConfigError: a configuration or a number that cannot be used.
    """
    config = read_config(folder)
    context = min(4096, config.max_position_embeddings) if context is None else context
    capacity = Capacity(requests=requests, tokens=requests * context, context=context)
    pools = pool_bytes(config, capacity, form)
    yield pairs_table(f"Configuration of {escape(str(folder))}", _config_rows(config))
    yield _layer_table(config)
    report = file_report(folder, config)
    yield _part_table(config, {} if report is None else report.bytes_by_part())
    if report is not None:
        yield _file_table(report)
    yield _cache_table(config, context, form)
    title = f"Pools of {requests:,} x {context:,} tokens ({_shown_form(config, form)})"
    rows = [(name, show_bytes(size)) for name, size in pools.items()]
    yield pairs_table(title, [*rows, ("total", show_bytes(sum(pools.values())))])
    storage = FORMS["fp4"] if report is None else report.storage
    if storage is not None:
        yield _memory_table(config, storage, sum(pools.values()), is_assumed=report is None)
    if report is not None:
        yield _verdict_table(report)


def pairs_table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Lay out names and what they stand for."""
    table = _table(title, "", "")
    for row in rows:
        table.add_row(*row)
    return table


def show_bytes(size: int | Fraction) -> str:
    """Write a number of bytes for people: exactly, and from a thousand on in a larger unit too."""
    exact = f"{int(size):,}" if size == int(size) else f"{float(size):,.2f}"
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{exact} ({float(size / unit):.2f} {name})"
    return exact


def show_layers(layers: Sequence[int]) -> str:
    """Write ascending layer numbers as ranges: ``0-1, 3-41 step 2``."""
    shown, at = [], 0
    while at < len(layers):
        end, step = at, layers[at + 1] - layers[at] if at + 1 < len(layers) else 1
        while end + 1 < len(layers) and layers[end + 1] - layers[end] == step:
            end += 1
        # Two layers that are not neighbours make no range.
        if end == at or (end == at + 1 and step > 1):
            shown.append(str(layers[at]))
            at += 1
            continue
        shown.append(f"{layers[at]}-{layers[end]}" + (f" step {step}" if step > 1 else ""))
        at = end + 1
    return ", ".join(shown)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if at else "left")
    return table


def _config_rows(config: Config) -> Iterator[tuple[str, str]]:
    fields = attrs.asdict(config, recurse=False)
    # The layer table shows the ratios.
    del fields["compress_ratios"]
    yield "family", family_of(config)
    for name, field in fields.items():
        yield name, _show_field(field)


def _show_field(field: Any) -> str:
    if attrs.has(type(field)):
        return ", ".join(f"{name} {number}" for name, number in attrs.asdict(field).items())
    if isinstance(field, tuple):
        return ", ".join(map(str, field)) or "none"
    return "none" if field is None else str(field)


def _layer_table(config: Config) -> Table:
    table = _table("Layers", "kind", "layers", "number")
    layers = range(config.num_hidden_layers)
    rows = [(_KINDS[ratio], [i for i in layers if config.layer_ratio(i) == ratio]) for ratio in _KINDS]
    rows.append(("experts by token id", [i for i in layers if config.is_hash(i)]))
    rows.append(("experts by score", [i for i in layers if not config.is_hash(i)]))
    for name, found in rows:
        if found:
            table.add_row(name, show_layers(found), str(len(found)))
    return table


def _part_table(config: Config, files: Mapping[str, int]) -> Table:
    costs = part_costs(config)
    table = _table("Parameters", "part", "number", f"bytes ({config.torch_dtype})", *["bytes in files"][: len(files)])
    for part in [*costs, *(part for part in files if part not in costs)]:
        cost = costs.get(part, PartCost(0, 0))
        shown = (f"{cost.n_parameters:,}", show_bytes(cost.n_bytes), show_bytes(files.get(part, 0)))
        table.add_row(part, *shown[: len(table.columns) - 1])
    total = PartCost(parameter_count(config), sum(cost.n_bytes for cost in costs.values()))
    shown = (f"{total.n_parameters:,}", show_bytes(total.n_bytes), show_bytes(sum(files.values())))
    table.add_section()
    table.add_row("total", *shown[: len(table.columns) - 1])
    table.add_row("met by one token", f"{active_parameters(config):,}")
    return table


def _file_table(report: FileReport) -> Table:
    table = _table(f"Weight files: {report.n_files:,}", "part", "type", "tensors", "bytes")
    for (part, kind), (count, n_bytes) in sorted(report.sizes.items()):
        table.add_row(part, kind, f"{count:,}", show_bytes(n_bytes))
    counts, sizes = zip(*report.sizes.values(), strict=True)
    table.add_section()
    table.add_row("total", "", f"{sum(counts):,}", show_bytes(sum(sizes)))
    return table


def _memory_table(config: Config, storage: Storage, pools: int, *, is_assumed: bool) -> Table:
    sizes = weight_bytes(config, storage)
    need, here = sum(sizes.values()) + pools, free_memory()
    rows = [
        ("weights as they are stored" + (" in releases" if is_assumed else ""), show_bytes(need - pools)),
        ("with these pools", show_bytes(need)),
        ("free here", "unknown" if here is None else show_bytes(here)),
        ("fits here", "unknown" if here is None else "yes" if need <= here else "no"),
    ]
    for gib in _DEVICES_GIB:
        degree = smallest_layout(config, sizes, pools, gib << 30)
        rows.append((f"ranks of {gib} GiB", "none by tensor parallelism alone" if degree is None else str(degree)))
    return pairs_table("Memory (ranks by arithmetic: activations not counted)", rows)


def _verdict_table(report: FileReport) -> Table:
    """Say whether the folder can be loaded, and name what is wrong."""
    rows = [("complete", "no" if report.faults else "yes")]
    for kind, names in report.faults.items():
        rest = f", and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
        rows.append((f"{len(names):,} {kind}", escape(", ".join(names[:_LISTED])) + rest))
    if report.strays:
        rows.append((f"{len(report.strays):,} ignored", escape(", ".join(report.strays[:_LISTED]))))
    return pairs_table("Files against the configuration", rows)


def free_memory() -> int | None:
    """Read how much memory of this machine is free, where the system says so."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _shown_form(config: Config, form: CacheForm) -> str:
    return config.torch_dtype if form == "plain" else f"{config.torch_dtype}, {form}"


def _cache_table(config: Config, context: int, form: CacheForm) -> Table:
    table = _table(
        f"Cache of one sequence ({_shown_form(config, form)})", "kind", "per token", "fixed", f"at {context:,} tokens"
    )
    costs = cache_costs(config, form=form)
    total = CacheCost(sum((c.per_token for c in costs.values()), Fraction(0)), sum(c.fixed for c in costs.values()))
    for name, cost in (*costs.items(), ("total", total)):
        shown = (cost.per_token, cost.fixed, cost.per_token * context + cost.fixed)
        table.add_row(name, *(show_bytes(size) for size in shown), end_section=name == "pooling state")
    return table
