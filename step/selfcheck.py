"""A start-up check that a model says different things in different places.

A checkpoint whose weights went wrong on the way (zeros, NaN) answers every prompt alike and raises nothing.

Source: none; it runs the public steps on two short prompts.
"""

from __future__ import annotations

import torch

from ..model.model import Model
from ..state.capacity import Capacity
from ..state.errors import CheckpointError
from ..state.sampling import SamplingParams
from .extend import extend_step
from .requests import init_state, open_request

__all__ = ["check_output"]


def check_output(model: Model) -> None:
    """Refuse a model whose logits are not finite, or the same for different prompts and positions.

    Args:
        model: a model that was just loaded.
    Raises:
        CheckpointError: the output is broken.
    """
    vocab = model.config.vocab_size
    prompts = [[i % vocab for i in ids] for ids in ((3, 7, 11, 2, 5), (13, 4, 9, 1, 6))]
    state = init_state(model, Capacity(requests=2, tokens=256, context=8))
    tokens = {}
    for prompt in prompts:
        state, request = open_request(state, SamplingParams(temperature=0))
        tokens[request] = prompt
    _, out = extend_step(model, state, tokens, sample=False, logits="all")
    if not bool(torch.isfinite(out.logits).all()):
        raise CheckpointError(
            "model: expected finite logits, got NaN or infinity; the weights are damaged", field="head"
        )
    # No two rows alike: a row is compared with the one after it, across the border of the prompts too.
    if bool((out.logits.diff(dim=0).abs().amax(-1) == 0).any()) or bool((out.logits.std(-1) == 0).any()):
        raise CheckpointError(
            "model: expected different logits for different tokens, got the same; a weight is missing or zero",
            field="head",
        )
