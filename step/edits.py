"""Edits: a caller's functions on the rows of chosen requests.

A function is given a copy of one token's row and can reach no other; batch mates keep theirs.

Source: none; a caller's function on a tensor's row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from ..model.stages import STAGES, Tap, full_names
from ..state.batch import ScheduleBatch
from ..state.captured import FedToken
from ..state.config import Config
from ..state.decode import DecodeState, find_request
from ..state.errors import RequestError, ShapeError
from .token_rows import TokenRows, checked_choices, fed_tokens, tokens_at

__all__ = ["Edit", "Edits", "edit_tap"]

Edit = Callable[[Tensor, FedToken], Tensor]
"""(copy of the token's row, which token) -> row to use instead, of the same shape and dtype."""

Edits = Mapping[int, Mapping[str, Edit]]
"""request -> stage name, with or without layer -> edit."""


@attrs.frozen(eq=False, kw_only=True)
class _Hook:
    """One edit of one request at one stage: for which token rows, and which tokens they are."""

    rows: tuple[int, ...]
    tokens: tuple[FedToken, ...]
    edit: Edit


def edit_tap(state: DecodeState, batch: ScheduleBatch, edits: Edits) -> Tap:
    """Build the tap that calls a caller's functions.

    Args:
        state: that the step runs on.
        batch: the prepared step.
        edits: request -> stage -> function; several that meet at one stage are called in the order given.
    Returns:
        A tap that calls each function once for every token of its request.
    Raises:
        RequestError: an unknown request, stage or layer.
    """
    hooks = _hooks(state, batch, edits)

    def tap(name: str, x: Tensor) -> Tensor:
        for hook in hooks.get(name, ()):
            x = _call(state.config, hook, x)
        return x

    return tap


def _hooks(state: DecodeState, batch: ScheduleBatch, edits: Edits) -> Mapping[str, Sequence[_Hook]]:
    """Find which edits meet which tokens of this step, by full stage name."""
    _check(edits)
    tokens, hooks = fed_tokens(batch), dict[str, list[_Hook]]()
    for request_id, by_stage in edits.items():
        find_request(state, request_id)
        rows = tuple(row for row, (owner, _) in enumerate(tokens) if owner == request_id)
        for given, edit in by_stage.items():
            names = full_names(state.config, (given,), "edit")
            for name in names if rows else ():
                named = tokens_at(name, (tokens[row] for row in rows))
                hooks.setdefault(name, []).append(_Hook(rows=rows, tokens=named, edit=edit))
    return hooks


def _check(edits: Edits) -> None:
    is_right = isinstance(edits, Mapping) and all(
        isinstance(by_stage, Mapping) and all(map(callable, by_stage.values())) for by_stage in edits.values()
    )
    if not is_right:
        raise RequestError(
            f"edit: expected {{request: {{stage: function of (row, token)}}}}, got {edits!r}", field="edit", got=edits
        )


def _call(config: Config, hook: _Hook, x: Tensor) -> Tensor:
    pairs = zip(hook.rows, hook.tokens, strict=True)
    values = torch.stack([_edited(config, x[row].clone(), token, hook.edit) for row, token in pairs])
    return TokenRows(rows=hook.rows, values=values).put_into(x)


def _edited(config: Config, row: Tensor, token: FedToken, edit: Edit) -> Tensor:
    """Call an edit for one token and check what it returns."""
    expected, new = _kind(row), edit(row, token)
    got = _kind(new) if isinstance(new, Tensor) else type(new).__name__
    if got != expected:
        raise ShapeError(
            f"edit: request {token.request_id}, position {token.position}, layer {token.layer}, {token.stage}: "
            f"expected a row like the one given, {expected}, got {got}",
            field="edit",
            expected=expected,
            got=got,
        )
    if STAGES[token.stage].is_choice:
        return checked_choices(config, new.unsqueeze(0), (token,), "edit").squeeze(0)
    return new


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} on {x.device}"
