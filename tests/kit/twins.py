"""Two states, one per model of a pair, driven through the same operations and compared after every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import purestep as ps
import torch
from ascend_sim.packed import unpack_rows
from kit.ascend import Pair
from kit.steps import ENDLESS
from purestep.state.ledger import live_rows, read_ledger
from torch import Tensor

__all__ = ["TOLERANCE", "Twins", "row_errors"]

TOLERANCE = 0.04
"""Largest difference of a row of logits, by root mean square, as a share of the row's own.

What differs: mHC products with 10 mantissa bits, entries pooled and normed without a rounding in between, index keys of
int8, expert outputs weighted and summed in bfloat16. Three layers of that measure 0.01 to 0.02."""

FP8_TOLERANCE = 0.15
"""The same where caches are FP8: a last bit of an entry may move its code by one step, an eighth of its value, which
few channels do not average out. It measures 0.006 to 0.04, and 0.07 at worst."""

CACHE_TOLERANCE = 0.15
"""Largest difference of a cached row, likewise; it measures 0.02 with int8 keys and 0.06 with FP8."""

CACHES = ("swa", "c4", "c128", "index")

CHOICES = ("attn.picks", "ffn.expert_ids")


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Measure every row's difference: f32[T]."""
    return (found - expected).square().mean(-1).sqrt() / expected.square().mean(-1).sqrt()


@attrs.define
class Twins:
    """One state per model; every operation runs on both.

    Attributes:
        pair: the models.
        kernels: state of the one on kernels.
        plain: state of the other.
        worst: largest row error so far.
        tolerance: largest row error that passes.
        is_choosing: force the kernels' choices of experts and entries on the plain model, for near-ties.
    """

    pair: Pair
    kernels: ps.DecodeState
    plain: ps.DecodeState
    worst: float = 0.0
    is_choosing: bool = False
    tolerance: float = TOLERANCE

    @classmethod
    def fresh(cls, pair: Pair, *, requests: int = 4, context: int = 512, page_size: int = 64, **limits: int) -> Twins:
        """Build two empty states with room for all requests."""
        capacity = ps.Capacity(requests=requests, tokens=requests * (context + page_size), context=context, **limits)
        states = [ps.init_state(model, capacity, page_size=page_size) for model in (pair.kernels, pair.plain)]
        return cls(pair, *states, tolerance=FP8_TOLERANCE if pair.kernels.cache_form == "packed" else TOLERANCE)

    def open(self) -> int:
        """Open a request in both."""
        self.kernels, request_id = ps.open_request(self.kernels, ENDLESS)
        self.plain, other = ps.open_request(self.plain, ENDLESS)
        assert request_id == other
        return request_id

    def fork(self, request_id: int, at: int | None = None) -> int:
        """Fork a request in both."""
        self.kernels, fork = ps.fork_request(self.kernels, request_id, at=at)
        self.plain, other = ps.fork_request(self.plain, request_id, at=at)
        assert fork == other
        return fork

    def rewind(self, request_id: int, n: int) -> None:
        """Cut a request's history in both."""
        self.kernels = ps.rewind_request(self.kernels, request_id, n)
        self.plain = ps.rewind_request(self.plain, request_id, n)

    def retract(self, request_id: int) -> None:
        """Take a request's memory back in both."""
        self.kernels = ps.retract_request(self.kernels, request_id)
        self.plain = ps.retract_request(self.plain, request_id)

    def close(self, request_id: int) -> None:
        """Close a request in both."""
        self.kernels = ps.close_request(self.kernels, request_id)
        self.plain = ps.close_request(self.plain, request_id)

    def extend(self, chunks: Mapping[int, Sequence[int]]) -> Tensor:
        """Feed chunks without sampling and compare every position's logits; return the kernels'."""
        options = {"sample": False, "logits": "all", "capture": CHOICES if self.is_choosing else ()}
        self.kernels, found = ps.extend_step(self.pair.kernels, self.kernels, chunks, **options)
        options = {"sample": False, "logits": "all", "replay": found.captured}
        self.plain, expected = ps.extend_step(self.pair.plain, self.plain, chunks, **options)
        return self._compare(found.logits, expected.logits)

    def decode(self, force: Mapping[int, int]) -> Tensor:
        """Decode one forced token each, and compare; return the kernels' logits.

        A token that the two sample differently, being nearly tied, is taken back from both.
        """
        options = {"only": list(force), "force": force}
        capture = CHOICES if self.is_choosing else ()
        self.kernels, found = ps.decode_step(self.pair.kernels, self.kernels, capture=capture, **options)
        self.plain, expected = ps.decode_step(self.pair.plain, self.plain, replay=found.captured, **options)
        for i, one, other in zip(found.request_ids, found.next_token_ids, expected.next_token_ids, strict=True):
            if one != other:
                self.rewind(i, len(ps.find_request(self.kernels, i).tokens) - 1)
        return self._compare(found.logits, expected.logits)

    def compare_caches(self) -> None:
        """Compare every entry and index key that a request may still read."""
        ledger = read_ledger(self.kernels)
        for holding in ledger.holdings:
            for name, slots in live_rows(ledger, holding).items():
                if name in CACHES and len(slots) and self.kernels.kv.layout.n_layers(name):
                    errors = row_errors(*(_rows(state, name, slots) for state in (self.kernels, self.plain)))
                    assert float(errors.max()) < CACHE_TOLERANCE, f"{name}: rows differ by {errors.tolist()}"

    def _compare(self, found: Tensor, expected: Tensor) -> Tensor:
        assert found.isfinite().all()
        errors = row_errors(found, expected)
        self.worst = max(self.worst, float(errors.max()))
        assert self.worst < self.tolerance, f"rows differ by {errors.tolist()} of their size"
        return found


def _rows(state: ps.DecodeState, name: str, slots: Sequence[int]) -> Tensor:
    """Read rows of every layer of a cache as numbers: f32[L*S,D]."""
    layout, handle = state.kv.layout, state.kv.handle
    firsts = torch.arange(layout.n_layers(name)).unsqueeze(-1) * layout.n_slots(name)
    at = (firsts + torch.as_tensor(slots)).flatten()
    rows = handle.rows(name, at)
    if layout.form == "packed" and name != "index":
        return unpack_rows(rows, state.config.head_dim, state.config.qk_rope_head_dim)
    if not layout.is_paged or name != "index":
        return rows.float()
    codes = rows.view(torch.float8_e4m3fn) if layout.form == "packed" else rows
    return codes.float() * handle.rows("index_scale", at).float()
