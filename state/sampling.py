"""What decides a request's next token besides its logits: its parameters, its seed, and what it said so far.

``SamplingParams`` is plain numbers, checked once when it is built. ``SamplingState`` holds one ``SamplingRow`` for each
open request, in order of opening; every function here returns a new state and leaves its input as it was.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import RequestError
from .values import value

__all__ = [
    "BIAS_LIMIT",
    "GREEDY_BELOW",
    "SEED_LIMIT",
    "TOP_LOGPROBS_LIMIT",
    "SamplingParams",
    "SamplingRow",
    "SamplingState",
    "TokenHistory",
    "add_row",
    "check_vocabulary",
    "count_history",
    "cut_row",
    "derive_seed",
    "drop_row",
    "fork_row",
    "observe_outputs",
    "observe_prompt",
    "replace_output",
    "row_of",
]

Ids: TypeAlias = Sequence[int] | NDArray[np.int64]

GREEDY_BELOW: Final = 1e-6
"""Temperatures below this mean greedy."""

BIAS_LIMIT: Final = 100.0
"""Largest size of a logit bias: far beyond any logit gap, and what clients of the usual HTTP interface expect."""

SEED_LIMIT: Final = 2**64
"""Seeds lie in ``0 <= seed < SEED_LIMIT``: the noise hashes them as two 32-bit words."""

TOP_LOGPROBS_LIMIT: Final = 20
"""Most alternatives that a request may ask the log-probabilities of."""

_SEED_RANGE: Final = "an integer, 0 <= seed < 2**64"
_WORD: Final = SEED_LIMIT - 1
_GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15  # the odd increment of splitmix64: 2**64 divided by the golden ratio


def _refusal(field: str, expected: str, got: Any) -> RequestError:
    message = f"SamplingParams.{field}: expected {expected}, got {got!r}; correct it or leave it out"
    return RequestError(message, field=field, expected=expected, got=got)


def _checked_real(field: str, number: Any, expected: str, is_allowed: Callable[[float], bool]) -> float:
    # A bool is an int to Python, but nobody means temperature=True. NaN fails every comparison in is_allowed.
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise _refusal(field, expected, number)
    try:
        converted = float(number)
    except OverflowError:
        raise _refusal(field, expected, number) from None
    if not is_allowed(converted):
        raise _refusal(field, expected, number)
    return converted


def _checked_whole(field: str, number: Any, expected: str, is_allowed: Callable[[int], bool]) -> int:
    if isinstance(number, bool) or not isinstance(number, numbers.Integral) or not is_allowed(int(number)):
        raise _refusal(field, expected, number)
    return int(number)


def _real(default: float, expected: str, is_allowed: Callable[[float], bool]) -> Any:
    def convert(number: Any, field: attrs.Attribute[float]) -> float:
        return _checked_real(field.name, number, expected, is_allowed)

    return attrs.field(default=default, converter=attrs.Converter(convert, takes_field=True))


def _whole(default: int | None, expected: str, is_allowed: Callable[[int], bool]) -> Any:
    def convert(number: Any, field: attrs.Attribute[int | None]) -> int | None:
        if number is None and default is None:
            return None
        return _checked_whole(field.name, number, expected, is_allowed)

    return attrs.field(default=default, converter=attrs.Converter(convert, takes_field=True))


def _bias_pairs(bias: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    expected = f"a mapping from token ids to finite numbers between -{BIAS_LIMIT:g} and {BIAS_LIMIT:g}"
    if not isinstance(bias, Iterable) or isinstance(bias, str | bytes):
        raise _refusal("logit_bias", expected, bias)
    checked: dict[int, float] = {}
    for pair in bias.items() if isinstance(bias, Mapping) else bias:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _refusal("logit_bias", expected, pair)
        token_id = _checked_whole("logit_bias", pair[0], "token ids: integers of at least 0", lambda key: key >= 0)
        if token_id in checked:
            raise _refusal("logit_bias", "each token id once", token_id)
        checked[token_id] = _checked_real("logit_bias", pair[1], expected, lambda number: abs(number) <= BIAS_LIMIT)
    return tuple(sorted(checked.items()))


def _stop_ids(token_ids: Iterable[int]) -> tuple[int, ...]:
    expected = "a sequence of token ids, integers of at least 0"
    if not isinstance(token_ids, Iterable) or isinstance(token_ids, str | bytes | Mapping):
        raise _refusal("stop_token_ids", expected, token_ids)
    return tuple(_checked_whole("stop_token_ids", token_id, expected, lambda key: key >= 0) for token_id in token_ids)


def _flag(flag: bool) -> bool:
    if not isinstance(flag, bool):
        raise _refusal("ignore_eos", "True or False", flag)
    return flag


def _is_seed(number: int) -> bool:
    return 0 <= number < SEED_LIMIT


@attrs.frozen
class SamplingParams:
    """How one request's tokens are chosen and when it ends; checked when built, equal and hashable by value.

    Attributes:
        temperature: finite, at least 0; below ``GREEDY_BELOW`` it means greedy.
        top_k: keep this many of the likeliest tokens; 0 or -1 keeps all, and so does any number above V.
        top_p: in (0, 1]. A token is dropped if the mass of the likelier ones exceeds it.
        min_p: in [0, 1]. A token is dropped if it is less likely than this share of the likeliest.
        repetition_penalty: above 0. Divides positive and multiplies negative logits of tokens seen in prompt or output.
        frequency_penalty: in [-2, 2]. Subtracted once for each time the output holds the token.
        presence_penalty: in [-2, 2]. Subtracted once if the output holds the token.
        logit_bias: given as a mapping; stored as pairs (token id, bias) in order of id. Bias in [-100, 100].
        seed: 0 <= seed < 2**64, or None for one derived from the engine's seed and the request id.
        max_new_tokens: at least 1, or None for no limit of its own.
        min_new_tokens: at least 0. Stop tokens, those of the model included, are held back until then.
        stop_token_ids: ids that end the request besides the model's own.
        ignore_eos: do not end at a stop token.
        logprobs: None for none, else how many alternatives to report beside the chosen token, 0 to 20.
    """

    temperature: float = _real(1.0, "a finite number of at least 0", lambda x: 0 <= x < math.inf)
    top_k: int = _whole(0, "an integer of at least -1 (0 and -1: off)", lambda k: k >= -1)
    top_p: float = _real(1.0, "a number above 0 and at most 1", lambda p: 0 < p <= 1)
    min_p: float = _real(0.0, "a number from 0 to 1", lambda p: 0 <= p <= 1)
    repetition_penalty: float = _real(1.0, "a finite number above 0", lambda x: 0 < x < math.inf)
    frequency_penalty: float = _real(0.0, "a number from -2 to 2", lambda x: -2 <= x <= 2)
    presence_penalty: float = _real(0.0, "a number from -2 to 2", lambda x: -2 <= x <= 2)
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(default=(), converter=_bias_pairs)
    seed: int | None = _whole(None, _SEED_RANGE + ", or None", _is_seed)
    max_new_tokens: int | None = _whole(None, "an integer of at least 1, or None", lambda n: n >= 1)
    min_new_tokens: int = _whole(0, "an integer of at least 0", lambda n: n >= 0)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_stop_ids)
    ignore_eos: bool = attrs.field(default=False, converter=_flag)
    logprobs: int | None = _whole(None, "an integer from 0 to 20, or None", lambda n: 0 <= n <= TOP_LOGPROBS_LIMIT)

    def __attrs_post_init__(self) -> None:
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise _refusal("min_new_tokens", f"at most max_new_tokens = {self.max_new_tokens}", self.min_new_tokens)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


@value
@attrs.frozen(eq=False, kw_only=True)
class SamplingRow:
    """One open request as the sampler sees it.

    Attributes:
        request_id: the request.
        params: its parameters.
        seed: its seed, given or derived, 0 <= seed < 2**64.
        n_outputs: tokens sampled so far.
        output_counts: i32[V]. How often each token was sampled; None without penalties.
        prompt_seen: bool[V]. Which tokens the prompt holds; None without penalties.
    """

    request_id: int
    params: SamplingParams
    seed: int
    n_outputs: int
    output_counts: Tensor | None
    prompt_seen: Tensor | None


@value
@attrs.frozen(eq=False, kw_only=True)
class SamplingState:
    """The open requests' rows, in order of opening."""

    rows: tuple[SamplingRow, ...] = ()


@value
@attrs.frozen(eq=False, kw_only=True)
class TokenHistory:
    """What a request read and said, as the penalties count it.

    Attributes:
        n_outputs: tokens sampled.
        output_counts: i32[V]. How often each was sampled.
        prompt_seen: bool[V]. Which tokens the prompt holds.
    """

    n_outputs: int
    output_counts: Tensor
    prompt_seen: Tensor


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that name tokens which the vocabulary lacks, or hold back every token it has.

    Args:
        params: the parameters of one request.
        vocab_size: V.
    Raises:
        RequestError: a bias or stop id of V or more; stop ids that cover the vocabulary while min_new_tokens counts.
    """
    expected = f"token ids below the vocabulary size {vocab_size}"
    for token_id, _bias in params.logit_bias:
        if token_id >= vocab_size:
            raise _refusal("logit_bias", expected, token_id)
    for token_id in params.stop_token_ids:
        if token_id >= vocab_size:
            raise _refusal("stop_token_ids", expected, token_id)
    if params.min_new_tokens > 0 and len(set(params.stop_token_ids)) == vocab_size:
        raise _refusal("stop_token_ids", "some token that is no stop token while min_new_tokens > 0", "every token")


def derive_seed(base_seed: int, request_id: int) -> int:
    """Derive a request's seed from the engine's: output number ``request_id`` of splitmix64, less its lowest bit.

    Neighbouring request ids give unrelated seeds, and the result is the same whoever else is open.

    Args:
        base_seed: the engine's seed; its low 64 bits count.
        request_id: the request, or the number of a choice among several of one request.
    Returns:
        A seed, 0 <= seed < 2**63.
    """
    mixed = (base_seed + (request_id + 1) * _GOLDEN_GAMMA) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
    return (mixed ^ (mixed >> 31)) >> 1


def count_history(
    prompt_ids: Ids,
    output_ids: Ids,
    *,
    vocab_size: int,
    device: torch.device | str | None = None,
) -> TokenHistory:
    """Count a request's tokens from scratch.

    Args:
        prompt_ids: the tokens it was given.
        output_ids: the tokens it sampled.
        vocab_size: V.
        device: where the counts live.
    Raises:
        RequestError: an id outside the vocabulary.
    """
    prompt = _checked_ids("count_history(prompt_ids)", prompt_ids, vocab_size)
    output = _checked_ids("count_history(output_ids)", output_ids, vocab_size)
    # Counted on the host, where the ids are, so that a device is only written to.
    counts = np.bincount(output, minlength=vocab_size).astype(np.int32)
    seen = np.bincount(prompt, minlength=vocab_size) > 0
    return TokenHistory(
        n_outputs=len(output),
        output_counts=torch.tensor(counts, device=device),
        prompt_seen=torch.tensor(seen, device=device),
    )


def add_row(
    sampling: SamplingState,
    request_id: int,
    params: SamplingParams,
    *,
    base_seed: int,
    vocab_size: int,
    device: torch.device | str | None = None,
    history: TokenHistory | None = None,
) -> SamplingState:
    """Open a request's row, behind the others.

    Args:
        sampling: the rows so far.
        request_id: a request without a row.
        params: its parameters.
        base_seed: the engine's seed, from which an unseeded request's own is derived.
        vocab_size: V.
        device: where the penalties' tensors live, if the parameters use any.
        history: what a request that resumes has read and said already; None for a new one.
    Raises:
        RequestError: the request has a row, or ``check_vocabulary`` refuses the parameters.
    """
    _require_new(sampling, request_id)
    check_vocabulary(params, vocab_size)
    if history is None and params.has_penalties:
        history = count_history((), (), vocab_size=vocab_size, device=device)
    seed = derive_seed(base_seed, request_id) if params.seed is None else params.seed
    return SamplingState(rows=(*sampling.rows, _make_row(request_id, params, seed, history)))


def drop_row(sampling: SamplingState, request_id: int) -> SamplingState:
    """Close a request's row.

    Raises:
        RequestError: the request has no row.
    """
    dropped = row_of(sampling, request_id)
    return SamplingState(rows=tuple(row for row in sampling.rows if row is not dropped))


def cut_row(sampling: SamplingState, request_id: int, history: TokenHistory) -> SamplingState:
    """Set a row back to an earlier history: same parameters, same seed.

    Args:
        sampling: the rows.
        request_id: the request.
        history: what it has read and said by then.
    """
    row = row_of(sampling, request_id)
    return _replace(sampling, row, _make_row(request_id, row.params, row.seed, history))


def row_of(sampling: SamplingState, request_id: int) -> SamplingRow:
    """Find a request's row.

    Raises:
        RequestError: the request has no row.
    """
    for row in sampling.rows:
        if row.request_id == request_id:
            return row
    known = tuple(row.request_id for row in sampling.rows)
    message = f"sampling: expected one of the open requests {known}, got {request_id!r}; open the request first"
    raise RequestError(message, field="request_id", expected=known, got=request_id)


def observe_prompt(sampling: SamplingState, request_id: int, ids: Ids) -> SamplingState:
    """Mark prompt tokens as seen, for the repetition penalty; chunks may come one after another.

    Args:
        sampling: the rows.
        request_id: the request that reads them.
        ids: prompt tokens, any number.
    Raises:
        RequestError: the request has no row, or an id lies outside the vocabulary.
    """
    row = row_of(sampling, request_id)
    if row.prompt_seen is None:
        return sampling
    checked = _checked_ids("observe_prompt(ids)", ids, row.prompt_seen.shape[0])
    index = torch.tensor(checked, device=row.prompt_seen.device)
    return _replace(sampling, row, _changed(row, prompt_seen=row.prompt_seen.index_fill(0, index, True)))


def observe_outputs(sampling: SamplingState, request_ids: Sequence[int], ids: Tensor) -> SamplingState:
    """Count one sampled token for each named request, without reading it on the host.

    Args:
        sampling: the rows.
        request_ids: B different open requests; others are left alone.
        ids: i64[B]. Their tokens.
    Returns:
        Rows with ``n_outputs`` one higher, and with fresh counts where there are counts.
    """
    place = {request_id: at for at, request_id in enumerate(request_ids)}
    rows = [
        _observe_output(row, ids, place[row.request_id]) if row.request_id in place else row for row in sampling.rows
    ]
    return SamplingState(rows=tuple(rows))


def replace_output(sampling: SamplingState, request_id: int, old_id: int, new_id: int) -> SamplingState:
    """Count ``new_id`` in place of ``old_id``: the caller feeds another token than the one sampled last.

    Args:
        sampling: the rows.
        request_id: the request.
        old_id: the token that was sampled last.
        new_id: the token that stands in its place.
    Raises:
        RequestError: the request has no row or no output, or an id lies outside the vocabulary.
    """
    row = row_of(sampling, request_id)
    if row.n_outputs == 0:
        message = f"replace_output: expected a request with a sampled token, got {request_id} without; sample one first"
        raise RequestError(message, field="request_id", expected="n_outputs >= 1", got=request_id)
    if row.output_counts is None:
        return sampling
    device = row.output_counts.device
    checked = _checked_ids("replace_output(old_id, new_id)", (old_id, new_id), row.output_counts.shape[0])
    ids = torch.tensor(checked, device=device)
    change = torch.tensor([-1, 1], dtype=torch.int32, device=device)
    return _replace(sampling, row, _changed(row, output_counts=row.output_counts.index_add(0, ids, change)))


def fork_row(
    sampling: SamplingState,
    request_id: int,
    new_id: int,
    params: SamplingParams | None = None,
    seed: int | None = None,
    *,
    history: TokenHistory | None = None,
) -> SamplingState:
    """Open a row that continues another one: same parameters, seed and history, unless told otherwise.

    Args:
        sampling: the rows.
        request_id: the request that is forked.
        new_id: a request without a row.
        params: other parameters. Those that add penalties to a request without need ``history``, as it was not counted.
        seed: another seed; it wins over the one in ``params``, which wins over the parent's.
        history: counts for a fork that starts at an earlier token; None inherits the parent's.
    Raises:
        RequestError: no such request, ``new_id`` is taken, ``seed`` is out of range, or the counts that the penalties
            need are missing.
    """
    parent = row_of(sampling, request_id)
    _require_new(sampling, new_id)
    if seed is not None:
        seed = _checked_whole("seed", seed, _SEED_RANGE, _is_seed)
    elif params is not None and params.seed is not None:
        seed = params.seed
    else:
        # Not the seed in the parent's parameters: the parent may be a fork with a seed of its own.
        seed = parent.seed
    params = parent.params if params is None else params
    source = parent if history is None else history
    if params.has_penalties and source.output_counts is None:
        message = (
            f"fork_row: expected the history of request {request_id}, because the new parameters have penalties and "
            "the old ones none, so nothing was counted; pass history=count_history(prompt_ids, output_ids, ...)"
        )
        raise RequestError(message, field="history", expected="a TokenHistory", got=None)
    return SamplingState(rows=(*sampling.rows, _make_row(new_id, params, seed, source)))


def _make_row(
    request_id: int, params: SamplingParams, seed: int, history: SamplingRow | TokenHistory | None
) -> SamplingRow:
    counts = history if params.has_penalties else None
    return SamplingRow(
        request_id=request_id,
        params=params,
        seed=seed,
        n_outputs=0 if history is None else history.n_outputs,
        output_counts=None if counts is None else counts.output_counts,
        prompt_seen=None if counts is None else counts.prompt_seen,
    )


def _observe_output(row: SamplingRow, ids: Tensor, at: int) -> SamplingRow:
    counts = row.output_counts
    if counts is not None:
        counts = counts.index_add(0, ids[at : at + 1], counts.new_ones(1))
    # Every request changes so in every step; naming the fields takes less time than attrs.evolve.
    return SamplingRow(
        request_id=row.request_id,
        params=row.params,
        seed=row.seed,
        n_outputs=row.n_outputs + 1,
        output_counts=counts,
        prompt_seen=row.prompt_seen,
    )


def _changed(row: Any, **changes: Any) -> SamplingRow:
    changed: SamplingRow = attrs.evolve(row, **changes)
    return changed


def _replace(sampling: SamplingState, old: SamplingRow, new: SamplingRow) -> SamplingState:
    return SamplingState(rows=tuple(new if row is old else row for row in sampling.rows))


def _require_new(sampling: SamplingState, request_id: int) -> None:
    if any(row.request_id == request_id for row in sampling.rows):
        message = f"sampling: expected a request without a row, got {request_id}; close it first or take another id"
        raise RequestError(message, field="request_id", expected="a new request id", got=request_id)


def _checked_ids(where: str, ids: Ids, vocab_size: int) -> NDArray[np.int64]:
    array = np.asarray(ids, np.int64)
    wrong = array[(array < 0) | (array >= vocab_size)]
    if wrong.size:
        message = (
            f"{where}: expected token ids of at least 0 and below {vocab_size}, got {wrong[0]}; check the tokenizer"
        )
        raise RequestError(message, field="ids", expected=f"0 <= id < {vocab_size}", got=int(wrong[0]))
    return array
