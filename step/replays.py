"""Replay: force the choices that earlier steps recorded, token by token.

Source: none; forced experts are weighed like those of a hash layer (model sheet 2.10).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..model.stages import STAGES, Tap, full_names, split_name
from ..state.batch import ScheduleBatch
from ..state.captured import Captured
from ..state.config import Config
from ..state.errors import RequestError, ShapeError
from .token_rows import TokenRows, checked_choices, fed_tokens, tokens_at

__all__ = ["Replay", "replay_tap"]

Replay = Captured | Iterable[Captured]
"""What steps captured; the last record of a token counts."""


def replay_tap(config: Config, batch: ScheduleBatch, replay: Replay) -> Tap:
    """Build the tap that forces recorded choices.

    Args:
        config: the model's numbers.
        batch: the prepared step.
        replay: records; only those of their tokens that this step is fed are looked at.
    Returns:
        A tap that puts the recorded choices into the rows of their tokens.
    Raises:
        RequestError: a record without choices, of other stages, or with a choice that its token cannot make; or no
            record of any token that this step is fed.
        ShapeError: a record that does not fit the model.
    """
    forced = _forced_rows(config, batch, replay)

    def tap(name: str, x: Tensor) -> Tensor:
        return forced[name].put_into(x) if name in forced else x

    return tap


def _forced_rows(config: Config, batch: ScheduleBatch, replay: Replay) -> Mapping[str, TokenRows]:
    """Find what the records say about the tokens of this step, by full stage name."""
    tokens = fed_tokens(batch)
    row_of = {token: row for row, token in enumerate(tokens)}
    found: dict[str, dict[int, Tensor]] = {}
    records = _records(replay)
    _check_tokens(tokens, records)
    for record in records:
        recorded = enumerate(zip(record.request_ids, record.positions, strict=True))
        matches = [(row_of[token], i) for i, token in recorded if token in row_of]
        for name, values in _choices(config, record).items():
            lines = values.unbind(0)
            found.setdefault(name, {}).update((row, lines[i]) for row, i in matches)
    forced = {}
    for name, line_of in found.items():
        if line_of:
            named = tokens_at(name, (tokens[row] for row in line_of))
            values = checked_choices(config, torch.stack([*line_of.values()]), named, "replay")
            forced[name] = TokenRows(rows=tuple(line_of), values=values)
    return forced


def _records(replay: Replay) -> tuple[Captured, ...]:
    found: Any = replay
    records: tuple[Any, ...] = (
        tuple(found) if isinstance(found, Iterable) and not isinstance(found, Captured) else (found,)
    )
    for record in records:
        if not isinstance(record, Captured) or len(record.request_ids) != len(record.positions):
            raise RequestError(
                f"replay: expected what a step captured, or a sequence of that, got {type(record).__name__}; "
                "pass out.captured",
                field="replay",
                expected="Captured",
                got=record,
            )
    return records


def _check_tokens(tokens: Sequence[tuple[int, int]], records: Sequence[Captured]) -> None:
    """Refuse records that would force nothing; a rank without requests of its own is fed nothing."""
    recorded = [token for record in records for token in zip(record.request_ids, record.positions, strict=True)]
    if tokens and recorded and not {*tokens} & {*recorded}:
        raise RequestError(
            f"replay: expected records of tokens that this step is fed ({_show(tokens)}), got others "
            f"({_show(recorded)}); give them the ids of these requests with Captured.relabel, or leave replay out",
            field="replay",
            expected=tuple(tokens),
            got=tuple(recorded),
        )


def _show(tokens: Iterable[tuple[int, int]]) -> str:
    """Write tokens as requests and the ends of their positions."""
    positions: dict[int, list[int]] = {}
    for request_id, position in tokens:
        positions.setdefault(request_id, []).append(position)
    shown = [
        f"request {one} at {min(at)}" + (f"-{max(at)}" if max(at) > min(at) else "") for one, at in positions.items()
    ]
    return ", ".join(shown[:4]) + (f", and {len(shown) - 4} more requests" if len(shown) > 4 else "")


def _choices(config: Config, record: Captured) -> Mapping[str, Tensor]:
    """Return the stages of a record that can be forced, by full name."""
    stages = {name: x for given, x in record.stages.items() for name in full_names(config, (given,), "replay")}
    choices = {name: x for name, x in stages.items() if STAGES[split_name(name)[1]].is_choice}
    if stages and not choices:
        known = ", ".join(name for name, stage in STAGES.items() if stage.is_choice)
        raise RequestError(
            f"replay: expected records with choices ({known}), got stages {tuple(record.stages)}; name them in "
            "capture=",
            field="replay",
            expected=known,
            got=tuple(record.stages),
        )
    for name, x in choices.items():
        _check_shape(config, name, x, len(record.positions))
    return choices


def _check_shape(config: Config, name: str, x: Tensor, n_tokens: int) -> None:
    is_experts = split_name(name)[1] == "ffn.expert_ids"
    expected = (n_tokens, config.num_experts_per_tok if is_experts else config.index_topk)
    if x.dtype is not torch.int64 or x.shape != expected:
        raise ShapeError(
            f"replay: {name}: expected i64{list(expected)}, one row per recorded token, got {x.dtype} "
            f"{list(x.shape)}; was it captured from this model?",
            field=name,
            expected=expected,
            got=tuple(x.shape),
        )
