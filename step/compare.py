"""Where two runs part: the first step, layer, stage and number that differ.

A run is what its steps captured, in order. Tokens are matched by (request, position), so two runs may differ in
batching, chunking, order of rows and number of steps. A token that a run fed several times, after a rewind say, is
matched time by time: the first with the first, the second with the second.

Source: none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product

import attrs
import torch
from torch import Tensor

from ..model.stages import STAGES, split_name
from ..state.errors import RequestError, ShapeError
from .runs import IN_ORDER, LOGITS, IndexedRun, Place, Run

__all__ = ["Comparison", "Difference", "compare_runs", "first_difference"]


@attrs.frozen(kw_only=True)
class Difference:
    """The first tensor in which two runs differ, and the number in it that differs most; ``str`` tells it in words.

    Attributes:
        step_a: of the first run, from 0.
        step_b: of the second run, where the same token was fed.
        layer: 0 to L-1, or None outside the layers.
        stage: name without layer, or "logits".
        shape: shape token of the stage.
        request_id: whose row of the first run.
        position: of the token within its request.
        index: within the token's row.
        value_a: what the first run has there.
        value_b: what the second run has there.
        largest_abs: largest ``|a - b|`` of the numbers that differ in this tensor.
        largest_rel: largest ``|a - b| / max(|a|, |b|)`` of them, perhaps of another number.
        n_differing: how many numbers differ in this tensor.
        n_compared: of how many.
        n_before: numbers compared before this tensor; all of them agree.
    """

    step_a: int
    step_b: int
    layer: int | None
    stage: str
    shape: str
    request_id: int
    position: int
    index: tuple[int, ...]
    value_a: float
    value_b: float
    largest_abs: float
    largest_rel: float
    n_differing: int
    n_compared: int
    n_before: int

    def __str__(self) -> str:
        where = self.stage if self.layer is None else f"layer {self.layer}, {self.stage}"
        text = (
            f"First difference: step {self.step_a} ({self.step_b} in the second run), {where} ({self.shape}), request "
            f"{self.request_id}, position {self.position}, index {list(self.index)}: {self.value_a:.9g} in the first "
            f"run, {self.value_b:.9g} in the second. {self.n_differing:,} of {self.n_compared:,} numbers differ in "
            f"this tensor, by at most {self.largest_abs:.3g} (relative {self.largest_rel:.3g}). All {self.n_before:,} "
            "numbers compared before it agree."
        )
        return f"{text} {self.hint}".rstrip()

    @property
    def hint(self) -> str:
        """What else may explain the difference, or nothing."""
        is_input = (self.layer, self.stage) == (0, "streams")
        return "Layer 0 starts from the embedding: were the same tokens fed?" if is_input else ""


@attrs.frozen(kw_only=True)
class Comparison:
    """What two runs have in common, and where they part.

    Attributes:
        requests: (id in the first run, id in the second) of every pair with tokens in both.
        n_tokens: tokens that both runs fed.
        stages: full names that both runs have, in the order of the forward.
        n_numbers: numbers compared, up to and including the first tensor that differs.
        difference: where they part, or None.
    """

    requests: tuple[tuple[int, int], ...]
    n_tokens: int
    stages: tuple[str, ...]
    n_numbers: int
    difference: Difference | None


def first_difference(
    run_a: Run, run_b: Run, *, atol: float = 0.0, rtol: float = 0.0, requests: Mapping[int, int] | None = None
) -> Difference | None:
    """Find where two runs part.

    The walk follows run a: its steps, in each the layers and their stages in the order of ``STAGES``, the final streams
    and the logits. The first tensor that differs is reported by the number that differs most; among equals the first.
    What only one run has (requests, tokens, stages, logits) is not compared. Runs that sampled different tokens differ
    first in the streams of layer 0.

    Args:
        run_a: ``out.captured`` of every step, in order.
        run_b: of the other run; batch, chunks, kernels and dtype may be others.
        atol: two numbers agree if ``|a - b| <= atol + rtol * max(|a|, |b|)``, in double precision. NaN agrees with NaN;
            an infinity only with itself. Whole numbers (expert ids, picks) agree only when equal, order included.
        rtol: see ``atol``.
        requests: id in run a -> id in run b, for those to compare; default all ids that both have.
    Returns:
        The difference, or None where everything in common agrees.
    Raises:
        RequestError: nothing in common, an id that a run does not have, not a run, or a tolerance below 0.
        ShapeError: runs of different models, or a damaged record.
    """
    return compare_runs(run_a, run_b, atol=atol, rtol=rtol, requests=requests).difference


def compare_runs(
    run_a: Run, run_b: Run, *, atol: float = 0.0, rtol: float = 0.0, requests: Mapping[int, int] | None = None
) -> Comparison:
    """Find where two runs part, and say how much they have in common; as ``first_difference``."""
    for name, tolerance in (("atol", atol), ("rtol", rtol)):
        if not 0 <= tolerance < math.inf:
            raise RequestError(f"{name}: expected a finite number from 0, got {tolerance}", field=name, got=tolerance)
    a, b = IndexedRun.of(run_a, "run_a"), IndexedRun.of(run_b, "run_b")
    names = _shared_names(a, b)
    partners = _partners(a, b, _request_pairs(a, b, requests))
    n_numbers, difference = 0, None
    for part in _parts(a, b, names, partners):
        x, y = a.gather(part.name, part.places_a), b.gather(part.name, part.places_b)
        difference = _difference(part, a, x, y, atol=atol, rtol=rtol, n_before=n_numbers)
        n_numbers += x.numel()
        if difference is not None:
            break
    if not n_numbers:
        raise RequestError(
            f"run_b: expected a token and a stage in common with run_a, got {b.summary()}; run_a has {a.summary()}; "
            "capture the same stages, or map requests to each other",
            field="run_b",
            expected=a.summary(),
            got=b.summary(),
        )
    matched = [(a.token(here)[0], b.token(there)[0]) for here, there in partners.items()]
    return Comparison(
        requests=tuple(dict.fromkeys(matched)),
        n_tokens=len(matched),
        stages=names,
        n_numbers=n_numbers,
        difference=difference,
    )


@attrs.frozen(eq=False, kw_only=True)
class _Part:
    """What is compared at once: the rows of one tensor of one step of run a, and those of run b for the same tokens.

    Attributes:
        name: full stage name.
        tokens: where the tokens are, in run a and in run b.
        places_a: where their rows of this tensor are.
        places_b: the same in run b.
    """

    name: str
    tokens: Sequence[tuple[Place, Place]]
    places_a: Sequence[Place]
    places_b: Sequence[Place]


def _shared_names(a: IndexedRun, b: IndexedRun) -> tuple[str, ...]:
    """List the tensors that both runs have, in the order of the forward, and refuse rows that cannot be compared."""
    for name in a.kinds.keys() & b.kinds.keys():
        ours, theirs = a.kinds[name], b.kinds[name]
        if ours.shape != theirs.shape or ours.dtype.is_floating_point != theirs.dtype.is_floating_point:
            raise ShapeError(
                f"run_b: {name}: expected rows like those of run_a, {ours}, got {theirs}; compare runs of one model",
                field=name,
                expected=ours,
                got=theirs,
            )
    return tuple(sorted(a.kinds.keys() & b.kinds.keys(), key=_forward_order))


def _forward_order(name: str) -> tuple[float, int]:
    layer, stage = split_name(name)
    return (math.inf if layer is None else layer), IN_ORDER.index(stage)


def _request_pairs(a: IndexedRun, b: IndexedRun, requests: Mapping[int, int] | None) -> Mapping[int, int]:
    ids_a, ids_b = ({request for request, _, _ in chain(*run.tokens)} for run in (a, b))
    if requests is None:
        return {request: request for request in ids_a & ids_b}
    for field, named, known in (("run_a", requests.keys(), ids_a), ("run_b", requests.values(), ids_b)):
        unknown = sorted({*named} - known)
        if unknown:
            raise RequestError(
                f"requests: expected ids of {field} ({', '.join(map(str, sorted(known)))}), got {unknown[0]}",
                field="requests",
                expected=sorted(known),
                got=unknown[0],
            )
    return requests


def _partners(a: IndexedRun, b: IndexedRun, names: Mapping[int, int]) -> Mapping[Place, Place]:
    """Find the place in run b of every token of run a that it has, in the order of run a."""
    places = {token: (step, row) for step, tokens in enumerate(b.tokens) for row, token in enumerate(tokens)}
    found = {}
    for step, tokens in enumerate(a.tokens):
        for row, (request, position, nth) in enumerate(tokens):
            there = places.get((names[request], position, nth)) if request in names else None
            if there is not None:
                found[step, row] = there
    return found


def _parts(a: IndexedRun, b: IndexedRun, names: Sequence[str], partners: Mapping[Place, Place]) -> Iterator[_Part]:
    """Yield what is to be compared, in the order in which run a computed it."""
    by_step: dict[int, list[tuple[Place, Place]]] = {}
    for here, there in partners.items():
        by_step.setdefault(here[0], []).append((here, there))
    for pairs, name in product(by_step.values(), names):
        tokens, places_a, places_b = [], [], []
        for here, there in pairs:
            line_a, line_b = a.line(name, here), b.line(name, there)
            if line_a is not None and line_b is not None:
                tokens.append((here, there))
                places_a.append(line_a)
                places_b.append(line_b)
        if tokens:
            yield _Part(name=name, tokens=tokens, places_a=places_a, places_b=places_b)


def _difference(
    part: _Part, a: IndexedRun, x: Tensor, y: Tensor, *, atol: float, rtol: float, n_before: int
) -> Difference | None:
    """Compare the rows of one tensor."""
    if x.dtype == y.dtype and torch.equal(x, y):
        return None
    absolute, relative, differs = _gaps(x, y, atol=atol, rtol=rtol)
    n_differing = int(differs.sum())
    if not n_differing:
        return None
    row, *index = (int(i) for i in torch.unravel_index(absolute.argmax(), absolute.shape))
    layer, stage = split_name(part.name)
    here, there = part.tokens[row]
    request_id, position, _ = a.token(here)
    return Difference(
        step_a=here[0],
        step_b=there[0],
        layer=layer,
        stage=stage,
        shape="f32[X,V]" if stage == LOGITS else STAGES[stage].shape,
        request_id=request_id,
        position=position,
        index=tuple(index),
        value_a=x[row, *index].item(),
        value_b=y[row, *index].item(),
        largest_abs=float(absolute.max()),
        largest_rel=float(relative.max()),
        n_differing=n_differing,
        n_compared=x.numel(),
        n_before=n_before,
    )


def _gaps(x: Tensor, y: Tensor, *, atol: float, rtol: float) -> tuple[Tensor, Tensor, Tensor]:
    """Measure how far numbers are apart, in double precision.

    Args:
        x: float[T,...] or i64[T,...].
        y: of the same shape.
        atol: see ``first_difference``.
        rtol: see ``first_difference``.
    Returns:
        (absolute f64[T,...], relative f64[T,...], differs bool[T,...]): gaps are 0 where the numbers agree, and
        infinite between a number and NaN.
    """
    if not x.is_floating_point():
        atol = rtol = 0.0
    x, y = x.double(), y.double()
    scale = torch.maximum(x.abs(), y.abs())
    absolute = (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    is_close = absolute.isfinite() & (absolute <= atol + rtol * scale)
    differs = ~(is_close | (x == y) | (x.isnan() & y.isnan()))
    relative = (absolute / scale).nan_to_num(nan=math.inf, posinf=math.inf)
    return absolute.where(differs, 0.0), relative.where(differs, 0.0), differs
