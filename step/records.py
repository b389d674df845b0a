"""Plain data for what saved states and exported requests have in common: the model, the request, its sampling row.

Source: none; the fields are those of ``state/``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from ..state.config_reading import config_to_dict
from ..state.decode import DecodeState, Request
from ..state.errors import CheckpointError, ConfigError, RequestError
from ..state.numerics import Numerics
from ..state.sampling import SEED_LIMIT, SamplingParams, SamplingRow, check_vocabulary
from ..state.tokens import TokenLog

__all__ = [
    "check_counts",
    "model_record",
    "read_request",
    "read_sampling",
    "request_record",
    "request_tensors",
    "require_model",
    "require_whole",
    "sampling_record",
]


def model_record(state: DecodeState) -> dict[str, Any]:
    """Say which model a state belongs to, and how its caches were computed."""
    return {
        "config": json.loads(json.dumps(config_to_dict(state.config))),
        "fingerprint": state.fingerprint,
        "dtype": str(state.kv.dtype).removeprefix("torch."),
        "numerics": attrs.asdict(state.numerics),
        "caches": state.kv.layout.form,
    }


def require_whole(ways: int) -> None:
    """Refuse caches of which this rank holds a part.

    Args:
        ways: ranks that they are dealt to.
    Raises:
        ConfigError: more than one.
    """
    if ways > 1:
        raise ConfigError(
            f"state: expected caches that are whole on every rank, got a part of them (dcp={ways}); requests and "
            "states with dealt caches cannot be saved or moved: load the model with Parallel(dcp=1)",
            field="dcp",
            expected=1,
            got=ways,
        )


def require_model(expected: Mapping[str, Any], found: Mapping[str, Any], where: Path | str) -> None:
    """Refuse what another model made.

    Args:
        expected: ``model_record`` of the state that shall take it.
        found: the one that was saved.
        where: for the message.
    Raises:
        CheckpointError: configuration, weights, dtype, numerics or the form of the caches differ.
    """
    # What was saved before a choice existed was made with its default.
    found = {"caches": "plain", **found, "numerics": attrs.asdict(Numerics()) | found["numerics"]}
    names = {
        "config": "another configuration",
        "dtype": f"dtype {found['dtype']}",
        "numerics": "other numerics",
        "caches": f"caches of the {found['caches']} form",
        "fingerprint": "other weights",
    }
    for name, what in names.items():
        if found[name] != expected[name]:
            is_short = name in ("dtype", "caches", "fingerprint")
            shown = (expected[name], found[name]) if is_short else ("the model's", what)
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
    """Build a request from its record and its tensors.

    Raises:
        ValueError: a field that no request has, for the reader of the file to report.
    """
    numbers = {name: entry for name, entry in record.items() if name != "finished"}
    if record["finished"] not in (None, "stop", "length") or not all(_is_count(entry) for entry in numbers.values()):
        raise ValueError(f"request: expected numbers from 0 on and an end that exists, got {dict(record)}")
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


def _is_count(entry: Any) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0


def read_sampling(
    record: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str, device: torch.device
) -> SamplingRow:
    """Build a sampling row from its record and its counts.

    Raises:
        ValueError: a field that no row has, for the reader of the file to report.
    """
    if not all(_is_count(record[name]) for name in ("request_id", "seed", "n_outputs")) or record["seed"] >= SEED_LIMIT:
        raise ValueError(f"sampling: expected a seed below 2**64 and counts, got {dict(record)}")
    given = {**record["params"], "logit_bias": [tuple(pair) for pair in record["params"]["logit_bias"]]}
    counts = {name: tensors.get(f"{prefix}{name}") for name in ("output_counts", "prompt_seen")}
    return SamplingRow(
        request_id=record["request_id"],
        params=SamplingParams(**given),
        seed=record["seed"],
        n_outputs=record["n_outputs"],
        **{name: None if count is None else count.to(device) for name, count in counts.items()},
    )


def check_counts(request: Request, row: SamplingRow, vocab_size: int, where: Path | str) -> None:
    """Refuse tokens, parameters or counts that are not those of one request of a model.

    Args:
        request: the request.
        row: its sampling row.
        vocab_size: V.
        where: for the message.
    Raises:
        CheckpointError: they do not belong together.
    """
    tokens, outputs = request.tokens.numpy(), request.output_positions.numpy()
    counts = {"output_counts": (row.output_counts, torch.int32), "prompt_seen": (row.prompt_seen, torch.bool)}
    try:
        check_vocabulary(row.params, vocab_size)
        is_sound = (
            bool(((tokens >= 0) & (tokens < vocab_size)).all())
            and bool((np.diff(outputs, prepend=-1, append=len(tokens)) > 0).all())
            and row.n_outputs == len(outputs)
            and all((count is not None) == row.params.has_penalties for count, _ in counts.values())
            and all(
                count is None or (tuple(count.shape), count.dtype) == ((vocab_size,), dtype)
                for count, dtype in counts.values()
            )
        )
    except RequestError:
        is_sound = False
    if not is_sound:
        raise CheckpointError(
            f"{where}: the tokens, parameters and counts of request {request.request_id} do not belong together: save "
            "or export it again",
            field="sampling",
            got=request.request_id,
        )
