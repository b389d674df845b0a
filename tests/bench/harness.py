"""What the benchmarks share: both engines on the same weights, and their report.

The peer is Hugging Face transformers' ``DeepseekV4ForCausalLM`` in its default set-up (eager attention is the only one
it has). Ratios come from one process that alternates the two engines, because a shared machine drifts from minute to
minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import purestep as ps
from purestep.serving.bench_cases import CASES
from purestep.serving.bench_peer import load_peer
from purestep.serving.bench_steps import DTYPES, write_case
from purestep.state.config import Config
from rich.console import Console
from rich.table import Table


@attrs.frozen(eq=False)
class Engines:
    """Both engines on the same weights."""

    config: Config
    ours: ps.Model
    peer: Any


@contextmanager
def folder_of(case: str, dtype: str) -> Iterator[Path]:
    """Draw weights and write them, for as long as they are being loaded."""
    with TemporaryDirectory() as folder:
        write_case(CASES[case], dtype, Path(folder))
        yield Path(folder)


def build(case: str, dtype: str) -> Engines:
    """Draw weights and load them into both engines."""
    with folder_of(case, dtype) as folder:
        ours = ps.load_model(folder, dtype=dtype, numerics=ps.Numerics.plain())
        return Engines(CASES[case], ours, load_peer(folder, DTYPES[dtype][0]))


def load_ours(case: str, dtype: str) -> ps.Model:
    """Draw weights and load them into our engine alone."""
    with folder_of(case, dtype) as folder:
        return ps.load_model(folder, dtype=dtype, numerics=ps.Numerics.plain())


def step_parser(description: str | None, batch: int) -> argparse.ArgumentParser:
    """Make the options of a script that measures steps of one case."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="small")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=20)
    return parser


def report(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table for people, then one JSON line a row."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(stderr=True).print(table)
    for row in rows:
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
