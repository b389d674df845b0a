"""A run in a folder: ``run.json`` (which tokens every step fed) and ``run.safetensors`` (what it computed for them).

The rows of one stage are stored together for all steps.

Source: none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Final

import torch
from torch import Tensor

from ..state.captured import Captured
from ..state.errors import DtypeError
from .container import DTYPES, open_folder, write_folder
from .runs import LOGITS, Run, checked_run, row_kinds, tensors_of

__all__ = ["load_run", "save_run"]

KIND: Final = "run"


def save_run(run: Run, path: str | PathLike[str]) -> None:
    """Write a run to a folder.

    Args:
        run: ``out.captured`` of every step, in order.
        path: folder, made if missing. An earlier run there is replaced only once the new one is written whole.
    Raises:
        RequestError: not a run.
        ShapeError: a record that is not in order, or a stage that changes between steps.
        DtypeError: numbers that the files have no name for.
        CheckpointError: the path is a file.
    """
    records = checked_run(run, "run")
    for name, kind in row_kinds(records, "run").items():
        if kind.dtype not in DTYPES.values():
            raise DtypeError(
                f"run: {name}: expected one of {', '.join(map(str, DTYPES.values()))}, got {kind.dtype}; convert it",
                field=name,
                expected=tuple(DTYPES.values()),
                got=kind.dtype,
            )
    rows: dict[str, list[Tensor]] = {}
    for record in records:
        for name, x in tensors_of(record).items():
            rows.setdefault(name, []).append(x)
    steps = [
        {
            "request_ids": record.request_ids,
            "positions": record.positions,
            "logit_rows": record.logit_rows,
            "stages": list(record.stages),
        }
        for record in records
    ]
    write_folder(path, KIND, {"steps": steps}, {name: torch.cat(parts) for name, parts in rows.items()})


def load_run(path: str | PathLike[str]) -> tuple[Captured, ...]:
    """Read a run that ``save_run`` wrote.

    Args:
        path: the folder.
    Returns:
        Its records, every tensor in memory of its own.
    Raises:
        CheckpointError: files are missing, cut, altered, of another kind or of another version.
    """
    with open_folder(path, KIND) as stored:
        steps = stored.records["steps"]
        parts = {name: _parts(stored.read(name), name, steps) for name in stored.specs}
        records = [
            Captured(
                request_ids=tuple(step["request_ids"]),
                positions=tuple(step["positions"]),
                stages={name: parts[name][at] for name in step["stages"]},
                logits=parts[LOGITS][at],
                logit_rows=tuple(step["logit_rows"]),
            )
            for at, step in enumerate(steps)
        ]
        return checked_run(records, str(stored.file))


def _parts(x: Tensor, name: str, steps: Sequence[Mapping[str, Any]]) -> Mapping[int, Tensor]:
    """Cut the rows of a stage into those of every step that has it."""
    if name == LOGITS:
        sizes = {at: len(step["logit_rows"]) for at, step in enumerate(steps)}
    else:
        sizes = {at: len(step["positions"]) for at, step in enumerate(steps) if name in step["stages"]}
    if sum(sizes.values()) != len(x):
        raise ValueError(f"{name} has {len(x)} rows, its steps {sum(sizes.values())}")
    return {at: part.clone() for at, part in zip(sizes, x.split([*sizes.values()]), strict=True)}
