"""How well a model predicts a text, measured through the paged caches that decode uses.

The text is cut into windows of at most ``context`` tokens, one starting every ``stride`` tokens. Each is a request of
its own: it is fed BOS and then its tokens, and the logits at a position give the bits of the token that follows. A
token counts in the first window that holds it, so every token counts once and, but for the first window's, has at least
``context - stride`` tokens before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from ..model.model import Model
from ..state.capacity import Capacity
from ..state.decode import DecodeState
from ..state.errors import ConfigError, RequestError
from ..state.sampling import SamplingParams
from ..step.decode import decode_step
from ..step.extend import extend_step
from ..step.generate import prompt_ids
from ..step.requests import init_state, open_request

__all__ = ["Score", "score_text", "score_tokens"]

Progress = Callable[[int, int], None]

_PAGE_SIZE: Final = 128

_LOGITS_BUDGET: Final = 1 << 26
"""Largest number of logits of one step (256 MiB in F32); chunks are cut to stay below it."""

_LONGEST_CHUNK: Final = 512
"""Tokens of one window fed at once; more gain nothing and cost memory."""

_NEVER_ENDS: Final = SamplingParams(temperature=0.0, ignore_eos=True)
"""What the model would say is of no interest here, and must not end a window."""


@attrs.frozen
class Score:
    """What a text costs under a model.

    Attributes:
        n_bytes: of the text in UTF-8.
        n_tokens: of the text, BOS not counted.
        bits: sum over all tokens of ``-log2 p(token | the window before it)``.
    """

    n_bytes: int
    n_tokens: int
    bits: float

    def __add__(self, other: Score) -> Score:
        return Score(self.n_bytes + other.n_bytes, self.n_tokens + other.n_tokens, self.bits + other.bits)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the text; does not depend on the tokenizer."""
        return self.bits / self.n_bytes

    @property
    def bits_per_token(self) -> float:
        """Bits per token."""
        return self.bits / self.n_tokens

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return 2.0**self.bits_per_token if self.bits_per_token < 1024 else math.inf  # 2**1024 is no float any more


@attrs.frozen
class _Window:
    """Tokens ``start .. end - 1`` of the text, of which those from ``first`` on count."""

    start: int
    first: int
    end: int


def score_text(
    model: Model,
    text: str,
    *,
    context: int,
    stride: int,
    batch: int = 1,
    by_token: bool = False,
    progress: Progress | None = None,
) -> Score:
    """Measure what a text costs.

    Args:
        model: a model with a tokenizer.
        text: at least one token long.
        context: as in ``score_tokens``, like everything that follows.
        stride: tokens between the starts of two windows.
        batch: windows that run together.
        by_token: feed single tokens.
        progress: called with (tokens counted, tokens).
    Raises:
        ConfigError: the model has no tokenizer or no BOS.
        RequestError: an empty text, one that the tokenizer changes, or numbers out of range.
    """
    n_bos = int(model.config.bos_token_id is not None)
    ids = prompt_ids(model, text)[n_bos:]
    if model.tokenizer.decode(ids, skip_special_tokens=False) != text:
        raise RequestError(
            "text: expected one that the tokenizer gives back unchanged, got other characters back, so its bytes "
            "cannot be counted; use score_tokens with token ids",
            field="text",
        )
    bits = score_tokens(model, ids, context=context, stride=stride, batch=batch, by_token=by_token, progress=progress)
    return Score(n_bytes=len(text.encode()), n_tokens=len(ids), bits=float(bits.sum()))


def score_tokens(
    model: Model,
    ids: Sequence[int],
    *,
    context: int,
    stride: int,
    batch: int = 1,
    by_token: bool = False,
    progress: Progress | None = None,
) -> Tensor:
    """Measure what every token of a text costs.

    Args:
        model: the model.
        ids: the text's tokens, without BOS.
        context: tokens that a window is fed, BOS included; also the tokens that it predicts.
        stride: tokens between the starts of two windows, at most ``context``.
        batch: windows that run together.
        by_token: feed single tokens through ``decode_step`` instead of chunks through ``extend_step``.
        progress: called with (tokens counted, tokens) after every step.
    Returns:
        f64[T]. Bits of every token.
    Raises:
        ConfigError: the model has no BOS, so nothing comes before the first token.
        RequestError: no tokens, ids outside the vocabulary, or numbers out of range.
    """
    bos = model.config.bos_token_id
    if bos is None:
        raise ConfigError(
            "config.bos_token_id: expected a token id to start every window with, got none", field="bos_token_id"
        )
    _check_range("text tokens", len(ids), 1, None)
    _check_range("token ids", min(ids), 0, model.config.vocab_size - 1)
    _check_range("token ids", max(ids), 0, model.config.vocab_size - 1)
    _check_range("context", context, 1, model.config.max_position_embeddings)
    _check_range("stride", stride, 1, context)
    _check_range("batch", batch, 1, None)
    windows = list(_windows(len(ids), context, stride))
    text = torch.tensor(ids)
    bits = torch.full((len(ids),), torch.nan, dtype=torch.float64)
    n_counted = 0
    for at in range(0, len(windows), batch):
        for window, start, costs in _costs(model, text, bos, windows[at : at + batch], by_token):
            counted = costs[max(0, window.first - start) :]
            bits[start + len(costs) - len(counted) : start + len(costs)] = counted
            n_counted += len(counted)
            if progress is not None:
                progress(n_counted, len(ids))
    return bits


def _check_range(name: str, got: int, least: int, most: int | None) -> None:
    if got < least or (most is not None and got > most):
        expected = f"at least {least}" if most is None else f"{least}..{most}"
        raise RequestError(f"{name}: expected {expected}, got {got}", field=name, expected=expected, got=got)


def _windows(n_tokens: int, context: int, stride: int) -> Iterator[_Window]:
    """Yield windows that together hold every token, each token counted in the first that holds it."""
    n_counted = 0
    for start in range(0, n_tokens, stride):
        end = min(start + context, n_tokens)
        yield _Window(start, n_counted, end)
        n_counted = end
        if end == n_tokens:
            return


def _costs(
    model: Model, text: Tensor, bos: int, windows: Sequence[_Window], by_token: bool
) -> Iterator[tuple[_Window, int, Tensor]]:
    """Run windows side by side; yield (window, first position, f64[T] bits) for every row of every step."""
    longest = max(window.end - window.start for window in windows)
    room = -(-longest // _PAGE_SIZE) * _PAGE_SIZE
    capacity = Capacity(requests=len(windows), tokens=len(windows) * room, context=longest)
    state = init_state(model, capacity, page_size=_PAGE_SIZE)
    rows: dict[int, tuple[_Window, Tensor]] = {}
    for window in windows:
        state, request_id = open_request(state, _NEVER_ENDS)
        rows[request_id] = window, torch.cat((torch.tensor([bos]), text[window.start : window.end - 1]))
    most = _LOGITS_BUDGET // (len(windows) * model.config.vocab_size)
    chunk = 1 if by_token else max(1, min(_LONGEST_CHUNK, most))
    for at in range(0, longest, chunk):
        fed = {request_id: ids[at : at + chunk] for request_id, (_, ids) in rows.items() if len(ids) > at}
        starts = [rows[request_id][0].start + at for request_id in fed]
        sizes = [len(ids) for ids in fed.values()]
        state, logits = _feed(model, state, fed, by_token)
        wanted = torch.cat([text[start : start + size] for start, size in zip(starts, sizes, strict=True)])
        nats = F.cross_entropy(logits, wanted.to(logits.device), reduction="none")
        bits = nats.to("cpu", torch.float64) / math.log(2)
        for request_id, start, part in zip(fed, starts, torch.split(bits, sizes), strict=True):
            yield rows[request_id][0], start, part


def _feed(model: Model, state: DecodeState, fed: Mapping[int, Tensor], by_token: bool) -> tuple[DecodeState, Tensor]:
    """Feed each request its tokens: (state, f32[T,V] logits of all of them)."""
    if by_token:
        state, out = decode_step(
            model, state, only=fed, force={request_id: int(ids) for request_id, ids in fed.items()}
        )
    else:
        state, out = extend_step(model, state, fed, sample=False, logits="all")
    return state, out.logits
