"""The self-test of the kernels: every check run on this machine, as a report that can be sent back."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from rich.markup import escape
from rich.table import Table

from ..ops.ascend.providers import Providers
from .kernel_bench import Bench, Check
from .kernel_checks import ROW_CHECKS
from .kernel_checks_cached import CACHE_CHECKS
from .kernel_table import KernelRow, Package

__all__ = [
    "CHECKS",
    "Verdict",
    "kernel_device",
    "kernel_table_view",
    "machine_facts",
    "report_fields",
    "run_checks",
    "verdict_table",
]

CHECKS: Final[tuple[Check, ...]] = (*ROW_CHECKS, *CACHE_CHECKS)
"""Every check of an operator against its reference."""

_UNCHECKED: Final[Mapping[str, str]] = {
    "dispatch": "needs several devices",
    "combine": "needs several devices",
    "attention_metadata": "runs inside the checks of attend",
    "index_metadata": "runs inside the checks of pick_entries",
    "write_window": "runs inside the checks of attend",
}


@attrs.frozen(eq=False, kw_only=True)
class Verdict:
    """What one check found.

    Attributes:
        operator: logical name.
        kernel: qualified name.
        case: what was tried.
        error: largest difference, as a share of the reference's largest number; None where nothing was compared, or
            the kernel gave something that is no number.
        tolerance: what is allowed.
        verdict: "passes", "fails", "error" or "not run".
        detail: why, where it is not a number.
    """

    operator: str
    kernel: str
    case: str
    error: float | None
    tolerance: float
    verdict: str
    detail: str = ""


def run_checks(providers: Providers, device: torch.device, checks: Iterable[Check] = CHECKS) -> tuple[Verdict, ...]:
    """Run the checks of every operator that a kernel runs.

    Args:
        providers: what runs each operator.
        device: of the kernels.
        checks: to run.
    Returns:
        One verdict per check, and one per kernel that no check is about.
    """
    bench = Bench(providers=providers, device=device)
    done = [
        _verdict(check, bench) for check in checks if providers.chip in check.chips and providers.has(check.operator)
    ]
    seen = {one.operator for one in done}
    kernels = {name: one.binding.qualified_name for name, one in providers.operators.items() if one.schema is not None}
    rest = [
        Verdict(
            operator=name,
            kernel=kernel,
            case="",
            error=None,
            tolerance=0.0,
            verdict="not run",
            detail=_UNCHECKED.get(name, "there is no check of it"),
        )
        for name, kernel in kernels.items()
        if name not in seen
    ]
    return (*done, *rest)


def _verdict(check: Check, bench: Bench) -> Verdict:
    kernel = bench.providers[check.operator].binding.qualified_name
    empty = Verdict(
        operator=check.operator,
        kernel=kernel,
        case=check.case,
        error=None,
        tolerance=check.tolerance,
        verdict="not run",
    )
    lacking = [name for name in check.needs if not bench.providers.has(name)]
    if lacking:
        return attrs.evolve(empty, detail=f"needs {', '.join(lacking)}")
    try:
        error = _difference(*check.run(bench))
    except Exception as problem:
        return attrs.evolve(empty, verdict="error", detail=f"{type(problem).__name__}: {problem}")
    if not math.isfinite(error):
        return attrs.evolve(empty, verdict="fails", detail="not a number where the reference has one")
    return attrs.evolve(empty, error=error, verdict="passes" if error <= check.tolerance else "fails")


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Measure the largest difference as a share of the largest expected number."""
    got, expected = got.cpu().double(), expected.cpu().double()
    if got.shape != expected.shape:
        raise ValueError(f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}")
    return float((got - expected).abs().max() / expected.abs().max())


def kernel_device() -> torch.device:
    """Choose the device of the kernels: the first NPU, or the CPU where the operators are simulated on it."""
    npu: Any = getattr(torch, "npu", None)
    return torch.device("npu:0") if npu is not None and npu.is_available() else torch.device("cpu")


def machine_facts(packages: Iterable[Package], chip: str, device: torch.device) -> dict[str, str]:
    """List what a reader of the report has to know about the machine."""
    npu: Any = getattr(torch, "npu", None)
    toolkit = os.environ.get("ASCEND_TOOLKIT_HOME", "")
    return {
        "purestep": version("purestep"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{one.name: one.version or one.problem or "version not known" for one in packages},
        "CANN": _toolkit_version(Path(toolkit)) if toolkit else "ASCEND_TOOLKIT_HOME is not set",
        "chip": chip,
        "device": npu.get_device_name(device) if device.type == "npu" else f"{device.type}, no NPU",
    }


def _toolkit_version(folder: Path) -> str:
    for name in ("version.cfg", "version.info"):
        if (folder / name).is_file():
            return " ".join((folder / name).read_text("utf-8", "replace").split())
    return f"no version file in {folder}"


def report_fields(
    facts: Mapping[str, str], rows: Iterable[KernelRow], verdicts: Iterable[Verdict]
) -> dict[str, dict[str, str] | list[dict[str, Any]]]:
    """Turn a report into plain values."""
    return {
        "machine": dict(facts),
        "operators": [attrs.asdict(row) for row in rows],
        "self_test": [attrs.asdict(one) for one in verdicts],
    }


def kernel_table_view(rows: Iterable[KernelRow]) -> Table:
    """Lay out what runs each operator."""
    table = Table(title="Operators")
    for column in ("operator", "provider", "kernel", "chip", "schema", "status"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in attrs.astuple(row)))
    return table


def verdict_table(verdicts: Iterable[Verdict]) -> Table:
    """Lay out what the checks found."""
    table = Table(title="Self-test")
    for column in ("operator", "kernel", "case", "max error", "tolerance", "verdict"):
        table.add_column(column, overflow="fold")
    for one in verdicts:
        error = "" if one.error is None else f"{one.error:.2e}"
        verdict = f"{one.verdict}: {one.detail}" if one.detail else one.verdict
        table.add_row(*map(escape, (one.operator, one.kernel, one.case, error, f"{one.tolerance:.0e}", verdict)))
    return table
