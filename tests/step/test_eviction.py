"""When window pages are given back cannot be seen in any result."""

from __future__ import annotations

from collections.abc import Callable

import purestep as ps
import pytest
import torch
from kit.checkpoints import random_tensors
from kit.configs import tiny_config
from kit.engine import GREEDY, engine_model, random_ids

CONFIG = tiny_config(ratios=(0, 4, 128), window=8, index_topk=64)
MODEL = engine_model(CONFIG, random_tensors(CONFIG, seed=3))
PAGE = 4


def _at_every_step(reach: int) -> Callable[[int, int, int, int], int]:
    return lambda pre, evicted, window, size: max(evicted, (pre - reach) // size * size)


def _run(monkeypatch: pytest.MonkeyPatch, policy: Callable[[int, int, int, int], int]) -> tuple[torch.Tensor, int]:
    """Prefill 30 tokens, decode 60 forced ones; logits of all steps, and window pages left free."""
    monkeypatch.setattr("purestep.step.prepare.eviction_end", policy)
    state = ps.init_state(MODEL, ps.Capacity(1, 128, 128), page_size=PAGE)
    state, a = ps.open_request(state, GREEDY)
    ids = random_ids(90, 64)
    state, out = ps.extend_step(MODEL, state, {a: ids[:30]})
    logits = [out.logits]
    for token in ids[30:]:
        state, out = ps.decode_step(MODEL, state, force={a: token})
        logits.append(out.logits)
    return torch.cat(logits), len(state.table.free_swa_pages)


def test_eviction_is_unobservable(monkeypatch: pytest.MonkeyPatch) -> None:
    """W11: giving pages back never, or as soon as allowed at every step, leaves every logit the same, bit for bit."""
    never, kept = _run(monkeypatch, lambda pre, evicted, window, size: evicted)
    eager, freed = _run(monkeypatch, _at_every_step(reach=8))
    assert torch.equal(never, eager)
    assert freed > kept
    # Evicting one page of the window itself must show, or this test could not fail.
    assert not torch.equal(never, _run(monkeypatch, _at_every_step(reach=3))[0])
