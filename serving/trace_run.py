"""The run that ``purestep trace`` shows: a few requests are prefilled, and the steps after that are traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Final

from ..model.model import Model
from ..state.capacity import Capacity
from ..state.errors import RequestError
from ..state.sampling import SamplingParams
from ..step.extend import extend_step
from ..step.generate import prompt_ids
from ..step.requests import init_state, open_request
from ..step.trace import trace_step
from ..step.trace_values import Trace
from .trace_text import TokenText

__all__ = ["history_prompts", "parse_histories", "token_texts", "trace_run"]

_TEXTS: Final = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void;",
    "The LORD is my shepherd; I shall not want. He maketh me to lie down in green pastures:",
    "And it came to pass in those days, that there went out a decree from Caesar Augustus,",
)
"""What the requests say when only the lengths of their histories are given."""


def parse_histories(text: str) -> tuple[int, ...]:
    """Read lengths from text such as ``10,7,20``.

    Raises:
        RequestError: it is not a list of positive numbers.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise RequestError(
            f'histories: expected positive numbers such as "10,7,20", got {text!r}', field="histories", got=text
        )
    return tuple(map(int, parts))


def history_prompts(model: Model, lengths: Sequence[int]) -> list[list[int]]:
    """Make one prompt of every length.

    Args:
        model: the model; without a tokenizer the prompts are ids that mean nothing.
        lengths: tokens of every prompt.
    Raises:
        RequestError: longer than the model's positions.
    """
    most = model.config.max_position_embeddings
    if max(lengths) >= most:
        raise RequestError(
            f"histories: expected less than the model's {most} positions, got {max(lengths)}",
            field="histories",
            expected=f"< {most}",
            got=max(lengths),
        )
    if model.tokenizer is None:
        return [list(islice(cycle(range(model.config.vocab_size)), length)) for length in lengths]
    texts = [prompt_ids(model, text) for text in _TEXTS]
    return [list(islice(cycle(texts[i % len(texts)]), length)) for i, length in enumerate(lengths)]


def token_texts(model: Model) -> TokenText:
    """Return what tells a token's text; nothing where there is no tokenizer."""
    if model.tokenizer is None:
        return lambda token: ""
    return lambda token: str(model.tokenizer.decode([token], skip_special_tokens=False))


def trace_run(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    steps: int,
    page_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Trace]:
    """Prefill requests and trace the steps after that.

    Args:
        model: the model.
        prompts: token ids, one request each.
        steps: how many to trace.
        page_size: tokens per page.
        progress: called as (steps done, steps).
    Returns:
        One trace a step.
    """
    # Room for one token more than is fed, so that no request ends for lack of it.
    context = min(max(map(len, prompts)) + steps + 1, model.config.max_position_embeddings)
    if max(map(len, prompts)) + steps > context:
        raise RequestError(
            f"steps: expected room for them within the model's {context} positions, got {steps} after "
            f"{max(map(len, prompts))} tokens",
            field="steps",
            got=steps,
        )
    capacity = Capacity(requests=len(prompts), tokens=len(prompts) * (context + page_size), context=context)
    state = init_state(model, capacity, page_size=page_size)
    tokens = {}
    for seed, prompt in enumerate(prompts):
        state, request_id = open_request(state, SamplingParams(temperature=0.8, seed=seed, ignore_eos=True))
        tokens[request_id] = prompt
    state, _ = extend_step(model, state, tokens)
    traces = []
    for step in range(steps):
        state, _, trace = trace_step(model, state)
        traces.append(trace)
        if progress is not None:
            progress(step + 1, steps)
    return traces
