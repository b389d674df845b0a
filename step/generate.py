"""Text from a prompt: a convenience on top of the steps.

Source: none; this composes the public steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ..model.model import Model
from ..state.batch import StepOutput
from ..state.capacity import Capacity
from ..state.errors import ConfigError, RequestError
from ..state.sampling import SamplingParams
from .decode import decode_step
from .extend import extend_step
from .requests import init_state, open_request

__all__ = ["generate", "generate_tokens", "prompt_ids", "without_control_tokens"]

CHUNK = 1024
"""Prompt tokens fed at once; bounds the memory of a long prefill."""


def generate_tokens(
    model: Model,
    prompt_ids: Sequence[int],
    params: SamplingParams | None = None,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[StepOutput]:
    """Run one request and yield every step that samples.

    Args:
        model: the model.
        prompt_ids: at least one token id.
        params: how to sample; ``max_new_tokens`` None means up to the model's last position.
        seed: base of the seed when ``params`` has none.
        progress: called as (prompt tokens fed, prompt tokens) after every prefill chunk.
    Yields:
        The output of each sampling step, one row; the last one has ``finished``.
    """
    params = params or SamplingParams()
    longest = model.config.max_position_embeddings
    wanted = len(prompt_ids) + (longest if params.max_new_tokens is None else params.max_new_tokens)
    context = max(1, min(wanted, longest))
    state = init_state(model, Capacity(requests=1, tokens=context, context=context), seed=seed)
    state, request_id = open_request(state, params)
    out: StepOutput | None = None
    for start in range(0, len(prompt_ids), CHUNK):
        end = min(start + CHUNK, len(prompt_ids))
        is_last = end == len(prompt_ids)
        state, out = extend_step(model, state, {request_id: prompt_ids[start:end]}, sample=is_last)
        if progress is not None:
            progress(end, len(prompt_ids))
    if out is None:
        raise RequestError(
            "prompt: expected at least one token, got none", field="prompt", expected=">= 1 token", got=0
        )
    yield out
    while not out.finished:
        state, out = decode_step(model, state)
        yield out


def generate(
    model: Model,
    prompt: str,
    params: SamplingParams | None = None,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[str]:
    """Continue a text, piece by piece.

    Args:
        model: a model with a tokenizer.
        prompt: text; the model's first token (BOS) is put before it. Spellings of control tokens stay text.
        params: how to sample.
        seed: base of the seed when ``params`` has none.
        progress: called as (prompt tokens fed, prompt tokens) after every prefill chunk.
    Yields:
        Pieces of text; joined they are the continuation. Characters that span tokens come whole.
    Raises:
        ConfigError: the checkpoint came without a tokenizer.
    """
    stream = DecodeStream(skip_special_tokens=True)
    ids = prompt_ids(model, prompt)
    for out in generate_tokens(model, ids, params, seed=seed, progress=progress):
        piece = stream.step(model.tokenizer, out.next_token_ids[0])
        if piece:
            yield piece


def prompt_ids(model: Model, prompt: str) -> list[int]:
    """Tokenize a prompt and put the model's BOS before it.

    Raises:
        ConfigError: the checkpoint came without a tokenizer.
    """
    if model.tokenizer is None:
        raise ConfigError(
            "model: expected a tokenizer.json in the checkpoint's folder, got none; use extend_step with token ids",
            field="tokenizer",
        )
    bos = [] if model.config.bos_token_id is None else [model.config.bos_token_id]
    return bos + without_control_tokens(model.tokenizer).encode(prompt, add_special_tokens=False).ids


def without_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer without its added vocabulary, so that no text of a user becomes a control token."""
    description = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps(description | {"added_tokens": [], "post_processor": None}))
