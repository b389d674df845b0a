"""The token rows of a step by (request, position), and what a caller may put into them.

Choices that a caller forces are read on the host and checked here: forced ones that no token can make must not reach a
gather.

Source: none; what can be chosen follows from model sheet 2.9 and 2.10.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor

from ..model.reading import ordered_picks
from ..model.stages import split_name
from ..state.batch import ScheduleBatch
from ..state.capacity import C4_RATIO
from ..state.captured import FedToken
from ..state.config import Config
from ..state.errors import RequestError
from .metadata import token_positions

__all__ = ["TokenRows", "checked_choices", "fed_tokens", "tokens_at"]


@attrs.frozen(eq=False, kw_only=True)
class TokenRows:
    """Some token rows of one stage.

    Attributes:
        rows: their numbers, each once.
        values: their content, float[B,...] or i64[B,...].
    """

    rows: tuple[int, ...]
    values: Tensor

    def put_into(self, x: Tensor) -> Tensor:
        """Return ``x`` with these rows instead of its own; the others keep their bits."""
        return x.index_copy(0, torch.tensor(self.rows, device=x.device), self.values.to(x.device))


def fed_tokens(batch: ScheduleBatch) -> list[tuple[int, int]]:
    """List (request id, position) of every token row of a step."""
    rows, positions = token_positions(batch)
    return [(batch.request_ids[row], position) for row, position in zip(rows, positions.tolist(), strict=True)]


def tokens_at(name: str, tokens: Iterable[tuple[int, int]]) -> tuple[FedToken, ...]:
    """Name tokens at a stage.

    Args:
        name: full stage name.
        tokens: (request id, position) each.
    Returns:
        One name per token.
    """
    layer, stage = split_name(name)
    return tuple(FedToken(request_id=r, position=p, layer=layer, stage=stage) for r, p in tokens)


def checked_choices(config: Config, choices: Tensor, tokens: Sequence[FedToken], field: str) -> Tensor:
    """Refuse choices that their tokens cannot make.

    Args:
        config: the model's numbers.
        choices: i64[B,K] or i64[B,P]. Expert ids or index picks.
        tokens: whose they are, all at one stage.
        field: argument that they come from, for messages.
    Returns:
        The choices as the model expects them: picks ascending.
    Raises:
        RequestError: an expert that does not exist, an entry that the token does not see, or one chosen twice.
    """
    is_experts = tokens[0].stage == "ffn.expert_ids"
    lowest = 0 if is_experts else -1
    limits = [config.n_routed_experts if is_experts else (token.position + 1) // C4_RATIO for token in tokens]
    ordered = choices.sort(dim=-1).values
    is_outside = (choices < lowest) | (choices >= torch.tensor(limits, device=choices.device).unsqueeze(-1))
    is_twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    bad = (is_outside.any(-1) | is_twice.any(-1)).nonzero()
    if len(bad):
        row = int(bad[0])
        token, padding = tokens[row], "" if is_experts else ", or -1 for none"
        raise RequestError(
            f"{field}: request {token.request_id}, position {token.position}, layer {token.layer}, {token.stage}: "
            f"expected distinct numbers in [0, {limits[row]}){padding}, got {choices[row].tolist()}",
            field=field,
            expected=limits[row],
            got=choices[row].tolist(),
        )
    return choices if is_experts else ordered_picks(choices)
