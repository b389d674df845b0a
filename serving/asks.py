"""What the HTTP layer asks the engine for, and what it hears back: one generation, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import attrs
from torch import Tensor

from ..state.errors import CapacityError
from ..state.sampling import SamplingParams

__all__ = ["CONSTRAINT_ERROR", "Ask", "Ended", "Mask", "QueueFullError", "Sampled", "TokenLogprobs"]

Mask = Callable[[tuple[int, ...]], Tensor | None]
"""Outputs so far -> i32[V/32] packed vocabulary bits (1 = allowed) for the next token; None leaves it free."""

CONSTRAINT_ERROR: Final = "constraint: "
"""How the error of a generation begins that its own mask caused."""

TokenLogprobs = tuple[float | None, tuple[tuple[int, float], ...]]
"""Log-probability of a token, and the likeliest ids with theirs."""


class QueueFullError(CapacityError):
    """More requests wait than the server lets wait; asking again later helps."""


@attrs.frozen(eq=False, kw_only=True)
class Ask:
    """One generation.

    Attributes:
        prompt_ids: at least one token id.
        params: how to sample; the caller sets the seed, so that it can be reported.
        prompt_logprobs: how many of the likeliest tokens to report for every token of the prompt; None for no report.
        mask: constraint on the next token, called before every step that samples for this request.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    prompt_logprobs: int | None = None
    mask: Mask | None = None


@attrs.frozen(eq=False, kw_only=True)
class Sampled:
    """A token of the reply.

    Attributes:
        token_id: the token.
        logprob: its log-probability, where the request asked.
        top: the likeliest ids with their log-probabilities, as many as asked for.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@attrs.frozen(eq=False, kw_only=True)
class Ended:
    """The last thing that is heard of a generation.

    Attributes:
        reason: why it ended.
        n_cached: prompt tokens that were taken over from an earlier request.
        prompt_logprobs: one entry per prompt token where asked for; the first has no log-probability.
        error: what went wrong, where the reason is "error".
    """

    reason: Literal["stop", "length", "abort", "error"]
    n_cached: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
