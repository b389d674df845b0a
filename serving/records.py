"""Recorded runs: making one from prompts, and telling where two of them part."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil
from typing import Final

import attrs
from rich.markup import escape
from rich.table import Table

from ..model.loading import build_model
from ..model.model import Model
from ..model.stages import full_names, split_name
from ..state.batch import StepOutput
from ..state.capacity import Capacity
from ..state.captured import Captured
from ..state.errors import CheckpointError, RequestError
from ..state.sampling import SamplingParams
from ..step.compare import Comparison, Difference
from ..step.decode import decode_step
from ..step.extend import extend_step
from ..step.requests import init_state, open_request
from ..step.run_files import load_run
from ..step.runs import IN_ORDER
from .info import pairs_table, show_layers

__all__ = ["diff_tables", "read_pairs", "read_run", "record_run", "row_independent"]

_PAGE_SIZE: Final = 128


def record_run(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    stages: Iterable[str],
    new_tokens: int,
    chunk: int,
    seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Captured, ...]:
    """Run prompts as one batch and keep what its steps compute.

    Args:
        model: the model.
        prompts: token ids of requests 0, 1, ...
        stages: names of what to keep, with or without layer.
        new_tokens: how many every request samples; stop tokens do not end it.
        chunk: prompt tokens of a request fed at once. All prompts end in the same step, so only the first chunk of each
            may be shorter.
        seed: what every request samples with at temperature 1; None takes the likeliest token.
        progress: called as (steps done, steps).
    Returns:
        The run: a record for every step.
    Raises:
        RequestError: an unknown stage, or token ids outside the vocabulary.
    """
    names = full_names(model.config, stages, "stages")
    params = SamplingParams(
        temperature=0.0 if seed is None else 1.0, seed=seed, ignore_eos=True, max_new_tokens=new_tokens
    )
    n_steps = ceil(max(map(len, prompts)) / chunk) + new_tokens - 1
    run: list[Captured] = []
    for out in _steps(model, prompts, params, names, chunk):
        if out.captured is not None:
            run.append(out.captured)
        if progress is not None:
            progress(len(run), n_steps)
    return tuple(run)


def row_independent(model: Model, kernels: str | None) -> Model:
    """Give a model arithmetic in which no row depends on its company.

    Args:
        model: the model.
        kernels: the kernels that were asked for.
    Raises:
        ConfigError: kernels, or caches dealt to ranks, that do not keep this promise.
    """
    numerics = attrs.evolve(model.numerics, invariant=True)
    alone = build_model(
        model.config, model.params, dtype=model.dtype, numerics=numerics, kernels=kernels, ranks=model.ranks
    )
    return attrs.evolve(alone, tokenizer=model.tokenizer)


def read_run(folder: str) -> tuple[Captured, ...]:
    """Read a recorded run.

    Raises:
        RequestError: there is none, or it is damaged. This is wrong use here: exit code 1 says that two runs differ.
    """
    try:
        return load_run(folder)
    except CheckpointError as error:
        raise RequestError(str(error), field="run", got=folder) from error


def read_pairs(pairs: Sequence[str]) -> Mapping[int, int] | None:
    """Read which requests are compared with which.

    Args:
        pairs: such as ``0:1``, the request of the first run in front.
    Returns:
        Ids of the first run -> ids of the second; None where no pair is given.
    Raises:
        RequestError: not a pair, or a request of the first run that is named twice.
    """
    found: dict[int, int] = {}
    for pair in pairs:
        match = re.fullmatch(r"(\d+):(\d+)", pair)
        if match is None or int(match[1]) in found:
            raise RequestError(
                f"--map: expected pairs like 0:1, each request of the first run once, got {' '.join(pairs)}",
                field="map",
                got=tuple(pairs),
            )
        found[int(match[1])] = int(match[2])
    return found or None


def diff_tables(names: tuple[str, str], runs: tuple[Sequence[Captured], ...], found: Comparison) -> Iterator[Table]:
    """Lay out what two runs have in common, and their first difference if there is one.

    Args:
        names: of the folders.
        runs: what they hold.
        found: the comparison of the two.
    """
    steps = [f"{escape(name)} ({len(run):,} steps)" for name, run in zip(names, runs, strict=True)]
    rows = [
        ("first run", steps[0]),
        ("second run", steps[1]),
        ("requests", ", ".join(f"{a}" if a == b else f"{a} with {b}" for a, b in found.requests)),
        ("tokens in both", f"{found.n_tokens:,}"),
        ("stages in both, layers", "\n".join(_show_stages(found.stages))),
        ("numbers compared", f"{found.n_numbers:,}"),
    ]
    yield pairs_table("Compared", rows)
    if found.difference is not None:
        yield pairs_table("First difference", _difference_rows(found.difference))


def _steps(
    model: Model, prompts: Sequence[Sequence[int]], params: SamplingParams, names: Sequence[str], chunk: int
) -> Iterator[StepOutput]:
    longest = max(map(len, prompts))
    context = min(longest + (params.max_new_tokens or 0), model.config.max_position_embeddings)
    room = ceil(context / _PAGE_SIZE) * _PAGE_SIZE
    capacity = Capacity(requests=len(prompts), tokens=len(prompts) * room, context=context)
    state = init_state(model, capacity, page_size=_PAGE_SIZE)
    request_ids = []
    for _ in prompts:
        state, request_id = open_request(state, params)
        request_ids.append(request_id)
    running = {*request_ids}
    for left in reversed(range(0, longest, chunk)):
        fed = {
            request_id: ids[max(0, len(ids) - left - chunk) : len(ids) - left]
            for request_id, ids in zip(request_ids, prompts, strict=True)
            if len(ids) > left
        }
        state, out = extend_step(model, state, fed, sample=left == 0, capture=names)
        running -= out.finished.keys()
        yield out
    while running:
        state, out = decode_step(model, state, capture=names)
        running -= out.finished.keys()
        yield out


def _show_stages(names: Iterable[str]) -> Iterator[str]:
    layers: dict[str, list[int]] = {}
    for name in names:
        layer, stage = split_name(name)
        layers.setdefault(stage, []).extend(() if layer is None else (layer,))
    for stage in sorted(layers, key=IN_ORDER.index):
        yield f"{stage} {show_layers(layers[stage])}".rstrip()


def _difference_rows(found: Difference) -> Iterator[tuple[str, str]]:
    yield "step", f"{found.step_a} of the first run, {found.step_b} of the second"
    yield "layer", "-" if found.layer is None else str(found.layer)
    yield "stage", f"{found.stage} {escape(found.shape)}"
    yield "request", str(found.request_id)
    yield "position", str(found.position)
    yield "index in its row", ", ".join(map(str, found.index))
    yield "first run has", f"{found.value_a:.9g}"
    yield "second run has", f"{found.value_b:.9g}"
    yield "numbers that differ", f"{found.n_differing:,} of {found.n_compared:,} of this step and stage"
    yield "largest difference", f"{found.largest_abs:.3g}, relative {found.largest_rel:.3g}"
    yield "numbers before it", f"{found.n_before:,}, all agree"
    if found.hint:
        yield "hint", found.hint
