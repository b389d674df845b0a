"""Plain data for what saved states and exported requests have in common: the model, the request, its sampling row.

Source: none; the fields are those of ``state/``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from ..state.config_reading import config_to_dict
from ..state.decode import DecodeState, Request
from ..state.errors import CheckpointError
from ..state.sampling import SamplingParams, SamplingRow
from ..state.tokens import TokenLog

__all__ = [
    "model_record",
    "read_request",
    "read_sampling",
    "request_record",
    "request_tensors",
    "require_model",
    "sampling_record",
]


def model_record(state: DecodeState) -> dict[str, Any]:
    """Say which model a state belongs to, and how its caches were computed."""
    return {
        "config": json.loads(json.dumps(config_to_dict(state.config))),
        "fingerprint": state.fingerprint,
        "dtype": str(state.kv.dtype).removeprefix("torch."),
        "numerics": attrs.asdict(state.numerics),
    }


def require_model(expected: Mapping[str, Any], found: Mapping[str, Any], where: Path | str) -> None:
    """Refuse what another model made.

    Args:
        expected: ``model_record`` of the state that shall take it.
        found: the one that was saved.
        where: for the message.
    Raises:
        CheckpointError: configuration, weights, dtype or numerics differ.
    """
    names = {
        "config": "another configuration",
        "dtype": f"dtype {found['dtype']}",
        "numerics": "other numerics",
        "fingerprint": "other weights",
    }
    for name, what in names.items():
        if found[name] != expected[name]:
            shown = (expected[name], found[name]) if name in ("dtype", "fingerprint") else ("the model's", what)
            raise CheckpointError(
                f"{where}: was made with {what}: expected {shown[0]}, got {shown[1]}; use the model it was made with",
                field=name,
                expected=expected[name],
                got=found[name],
            )


def request_record(request: Request) -> dict[str, Any]:
    """Say everything about a request but its tokens."""
    return attrs.asdict(request, recurse=False, filter=attrs.filters.exclude("tokens", "output_positions"))


def request_tensors(request: Request, row: SamplingRow, prefix: str) -> dict[str, Tensor]:
    """Return a request's tokens and counts by name."""
    found = {
        f"{prefix}tokens": torch.from_numpy(request.tokens.numpy()),
        f"{prefix}output_positions": torch.from_numpy(request.output_positions.numpy()),
    }
    if row.output_counts is not None and row.prompt_seen is not None:
        found |= {f"{prefix}output_counts": row.output_counts, f"{prefix}prompt_seen": row.prompt_seen}
    return found


def read_request(record: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> Request:
    """Build a request from its record and its tensors."""
    tokens, positions = (TokenLog.of(tensors[f"{prefix}{name}"].numpy()) for name in ("tokens", "output_positions"))
    return Request(**record, tokens=tokens, output_positions=positions)


def sampling_record(row: SamplingRow) -> dict[str, Any]:
    """Say everything about a sampling row but its counts."""
    return {
        "request_id": row.request_id,
        "params": attrs.asdict(row.params),
        "seed": row.seed,
        "n_outputs": row.n_outputs,
    }


def read_sampling(
    record: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str, device: torch.device
) -> SamplingRow:
    """Build a sampling row from its record and its counts."""
    given = {**record["params"], "logit_bias": [tuple(pair) for pair in record["params"]["logit_bias"]]}
    counts = {name: tensors.get(f"{prefix}{name}") for name in ("output_counts", "prompt_seen")}
    return SamplingRow(
        request_id=record["request_id"],
        params=SamplingParams(**given),
        seed=record["seed"],
        n_outputs=record["n_outputs"],
        **{name: None if count is None else count.to(device) for name, count in counts.items()},
    )
