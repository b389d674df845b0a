"""Strategies for prompts, parameters, capacities and whole histories of a state.

Lengths lie mostly around the borders where things happen: groups of 4 and 128, small pages, windows.

Source: none; values and operations are those of this package.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import attrs
from hypothesis import strategies as st

from ..model.model import Model
from ..state.capacity import Capacity
from ..state.decode import DecodeState
from ..state.errors import CapacityError
from ..state.sampling import SamplingParams
from .decode import decode_step
from .extend import extend_step
from .forks import fork_request
from .prepare import running_requests
from .requests import close_request, init_state, open_request, retract_request, rewind_request

__all__ = [
    "PAGE_SIZES",
    "Operation",
    "batches",
    "capacities",
    "drops",
    "interrupted",
    "lengths",
    "operations",
    "page_sizes",
    "prompts",
    "run_operation",
    "sampling_params",
    "states",
]

PAGE_SIZES: Final = (4, 8, 12, 32, 128)
"""Page sizes worth testing: one group, one ring of pooling state, no power of two, several rings, the default."""

Kind = Literal["open", "extend", "feed", "decode", "force", "fork", "cut fork", "rewind", "retract", "close"]


def page_sizes() -> st.SearchStrategy[int]:
    """Draw a page size."""
    return st.sampled_from(PAGE_SIZES)


def lengths(longest: int = 300, shortest: int = 1) -> st.SearchStrategy[int]:
    """Draw a number of tokens: mostly a few, now and then around a border of 128.

    Args:
        longest: upper limit.
        shortest: lower limit.
    """
    short, middle = st.integers(shortest, min(9, longest)), st.integers(shortest, min(40, longest))
    borders = [n for n in (124, 127, 128, 129, 132, 255, 256, 257) if shortest <= n <= longest]
    return st.one_of(short, short, short, middle, middle, *([st.sampled_from(borders)] if borders else []))


def drops(longest: int = 260) -> st.SearchStrategy[int]:
    """Draw how many tokens before its end a history is cut.

    Args:
        longest: upper limit; a history may be shorter and is then cut at its beginning.
    """
    borders = [n for n in (15, 40, 127, 128, 129, 132, 256, 260) if n <= longest]
    return st.one_of(st.integers(0, min(9, longest)), st.sampled_from(borders or [0]))


def prompts(vocab_size: int, longest: int = 300, shortest: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw token ids.

    Args:
        vocab_size: V.
        longest: most ids.
        shortest: fewest ids.
    """
    # Long lists would exhaust the data that one example may draw, so they repeat a short random pattern.
    patterns = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=12)

    def spell(n: int) -> st.SearchStrategy[tuple[int, ...]]:
        return patterns.map(lambda ids: tuple(ids[i % len(ids)] for i in range(n)))

    return lengths(longest, shortest).flatmap(spell)


def batches(vocab_size: int, places: int = 4, longest: int = 300) -> st.SearchStrategy[dict[int, tuple[int, ...]]]:
    """Draw ragged chunks for some of several requests, in any row order.

    Args:
        vocab_size: V.
        places: requests to choose from.
        longest: most ids of one chunk.
    """
    return st.dictionaries(st.integers(0, places - 1), prompts(vocab_size, longest), min_size=1, max_size=places)


def sampling_params(vocab_size: int) -> st.SearchStrategy[SamplingParams]:
    """Draw how a request is sampled; it shrinks to greedy without an end.

    Args:
        vocab_size: V.
    """
    ids = st.integers(0, vocab_size - 1)
    plain = st.builds(SamplingParams, temperature=st.just(0.0), ignore_eos=st.just(True))
    varied = st.builds(
        SamplingParams,
        temperature=st.sampled_from((0.0, 1.0, 0.3, 2.0)),
        top_k=st.sampled_from((0, 1, 5)),
        top_p=st.sampled_from((1.0, 0.7)),
        min_p=st.sampled_from((0.0, 0.2)),
        repetition_penalty=st.sampled_from((1.0, 1.3)),
        frequency_penalty=st.sampled_from((0.0, 0.5)),
        presence_penalty=st.sampled_from((0.0, -0.5)),
        logit_bias=st.dictionaries(ids, st.sampled_from((-100.0, 3.0)), max_size=2),
        seed=st.none() | st.integers(0, 2**64 - 1),
        max_new_tokens=st.none() | st.integers(2, 20),
        min_new_tokens=st.integers(0, 2),
        stop_token_ids=st.lists(ids, max_size=2).map(tuple),
        ignore_eos=st.booleans(),
        logprobs=st.none() | st.integers(0, 3),
    )
    return plain | varied


def capacities(longest: int = 300) -> st.SearchStrategy[Capacity]:
    """Draw a capacity, ample or so tight that pools run out.

    Args:
        longest: context.
    """
    ample = st.builds(Capacity, requests=st.just(4), tokens=st.just(4 * longest), context=st.just(longest))
    tight = st.builds(
        Capacity,
        requests=st.integers(1, 4),
        tokens=st.integers(16, 2 * longest),
        context=st.integers(8, longest),
        swa_tokens=st.none() | st.integers(16, longest),
        c128_pages=st.none() | st.integers(1, 4),
    )
    return st.one_of(ample, ample, tight)


@attrs.frozen(kw_only=True)
class Operation:
    """One change of a state, with requests named by place so that it fits any state.

    Attributes:
        kind: "feed" is an extend that does not sample, "force" a decode with a forced token.
        place: which of the open requests, modulo their number.
        ids: tokens to feed.
        params: how to sample; used by "open".
        drop: tokens that "cut fork" and "rewind" leave out at the end.
    """

    kind: Kind
    place: int = 0
    ids: tuple[int, ...] = (0,)
    params: SamplingParams = attrs.field(factory=SamplingParams)
    drop: int = 0


def operations(vocab_size: int, longest: int = 40) -> st.SearchStrategy[Operation]:
    """Draw an operation.

    Args:
        vocab_size: V.
        longest: most tokens fed at once.
    """
    kinds: tuple[Kind, ...] = (
        "open",
        "extend",
        "extend",
        "feed",
        "decode",
        "decode",
        "decode",
        "force",
        "fork",
        "cut fork",
        "rewind",
        "retract",
        "close",
    )
    return st.builds(
        Operation,
        kind=st.sampled_from(kinds),
        place=st.integers(0, 3),
        ids=prompts(vocab_size, longest),
        params=sampling_params(vocab_size),
        drop=drops(longest),
    )


def run_operation(model: Model, state: DecodeState, operation: Operation) -> DecodeState:
    """Apply an operation; where there is nothing for it to work on, the state stays.

    Args:
        model: the model.
        state: before.
        operation: what to do.
    Raises:
        CapacityError: a pool is short.
    """
    if operation.kind == "open":
        return open_request(state, operation.params)[0]
    if operation.kind == "decode":
        return decode_step(model, state)[0] if running_requests(state) else state
    is_step = operation.kind in ("extend", "feed", "force")
    requests = [r for r in state.requests if not (is_step and r.finished is not None)]
    if not requests:
        return state
    request = requests[operation.place % len(requests)]
    request_id, n = request.request_id, max(0, len(request.tokens) - operation.drop)
    if operation.kind == "fork":
        return fork_request(state, request_id)[0]
    if operation.kind == "cut fork":
        return fork_request(state, request_id, at=n)[0]
    if operation.kind == "rewind":
        return rewind_request(state, request_id, n)
    if operation.kind == "retract":
        return retract_request(state, request_id)
    if operation.kind == "close":
        return close_request(state, request_id)
    if operation.kind == "force":
        return decode_step(model, state, only=[request_id], force={request_id: operation.ids[0]})[0]
    return extend_step(model, state, {request_id: operation.ids}, sample=operation.kind == "extend")[0]


@st.composite
def states(draw: st.DrawFn, model: Model, longest: int = 40, max_operations: int = 8) -> DecodeState:
    """Draw a state that has a history: two requests at least, then random operations.

    Args:
        model: the model that steps it.
        longest: most tokens fed at once.
        max_operations: most operations after the first two requests.
    """
    state = init_state(model, Capacity(requests=4, tokens=1200, context=300), page_size=draw(page_sizes()))
    vocab_size = model.config.vocab_size
    first = [Operation(kind="open", params=draw(sampling_params(vocab_size))) for _ in range(2)]
    fed = [Operation(kind="extend", place=i, ids=draw(prompts(vocab_size, longest))) for i in range(2)]
    rest = draw(st.lists(operations(vocab_size, longest), max_size=max_operations))
    for operation in (*first, *fed, *rest):
        try:
            state = run_operation(model, state, operation)
        except CapacityError:
            continue
    return state


def interrupted(model: Model, operator: str, call: int, error: BaseException) -> Model:
    """Make a model whose operator raises at one of its calls, as a fault or an interrupt would.

    Args:
        model: the model.
        operator: name of a field of ``Ops``.
        call: how many calls go well before that.
        error: what is raised.
    """
    kernel = getattr(model.ops, operator)
    left = iter(range(call))

    def raising(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            raise error
        return kernel(*args, **kwargs)

    changed: dict[str, Any] = {operator: raising}
    return attrs.evolve(model, ops=attrs.evolve(model.ops, **changed))
