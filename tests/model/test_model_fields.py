"""What went wrong in other engines' model arithmetic and index selection, as properties of ours."""

from __future__ import annotations

from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.checkpoints import random_tensors
from kit.configs import tiny_config
from kit.engine import engine_model, feed_in_chunks, random_ids
from purestep.step.selfcheck import check_output

CLOSE = {"atol": 5e-5, "rtol": 0.0}


def _model(seed: int = 1, **options: Any) -> ps.Model:
    config = tiny_config(**options)
    return engine_model(config, random_tensors(config, seed))


COMPRESSING = _model(ratios=(4, 128, 4), index_topk=6)
WINDOW_ONLY = _model(ratios=(0,), hash_layers=0)


@settings(max_examples=25)
@given(n=st.integers(2, 160), p=st.integers(0, 158), token=st.integers(0, 63), data=st.data())
def test_no_position_sees_a_later_token(n: int, p: int, token: int, data: st.DataObject) -> None:
    """IDX-01: changing any later token, one inside the same group of four included, leaves the logits at p alone."""
    p = min(p, n - 2)
    ids = random_ids(n, 64, seed=n)
    changed = [*ids]
    changed[data.draw(st.sampled_from([p + 1, n - 1]))] = token
    paged = [feed_in_chunks(COMPRESSING, row, [n]) for row in (ids, changed)]
    plain = [ps.forward_sequence(COMPRESSING, torch.tensor(row)) for row in (ids, changed)]
    for before, after in (paged, plain):
        torch.testing.assert_close(before[: p + 1], after[: p + 1], **CLOSE)


@pytest.mark.parametrize("n_visible", [0, 1, 5, 6, 7])
def test_short_contexts_have_fewer_picks_than_places(n_visible: int) -> None:
    """IDX-03: with fewer entries than places to pick, decode equals the cache-free model; -1 places add nothing."""
    n = 4 * n_visible + 3
    ids = random_ids(n, 64, seed=n_visible)
    got = feed_in_chunks(COMPRESSING, ids, [1] * n, page_size=8)
    torch.testing.assert_close(got, ps.forward_sequence(COMPRESSING, torch.tensor(ids)), **CLOSE)


@settings(max_examples=10)
@given(before=st.integers(0, 300), other=st.integers(0, 300))
def test_only_distances_matter_in_a_window(before: int, other: int) -> None:
    """MTH-03: the same 128 tokens at other absolute positions give the same last logits in a window-only layer."""
    last = random_ids(128, 64, seed=9)
    rows = [random_ids(n, 64, seed=n) + last for n in (before, other)]
    a, b = (feed_in_chunks(WINDOW_ONLY, row, [len(row)])[-1] for row in rows)
    torch.testing.assert_close(a, b, **CLOSE)


def test_hash_layers_ignore_a_bias_and_weigh_by_scores() -> None:
    """MTH-05: a hash layer's experts follow the token id alone, their weights the gate's scores."""
    model = _model(ratios=(0,), hash_layers=1)
    ids = torch.tensor(random_ids(40, 64))
    logits = ps.forward_sequence(model, ids)
    layer = model.params.layers[0]
    louder = attrs.evolve(layer, ffn=attrs.evolve(layer.ffn, gate=layer.ffn.gate * 3))
    moved = attrs.evolve(model, params=attrs.evolve(model.params, layers=(louder,)))
    assert not torch.allclose(ps.forward_sequence(moved, ids), logits, atol=1e-3)
    assert layer.ffn.bias is None


def test_self_check_accepts_a_model_and_refuses_a_broken_one() -> None:
    """BAT-09: a model that answers everything alike, or with NaN, fails loudly at start-up."""
    check_output(COMPRESSING)
    params = COMPRESSING.params
    for broken in (
        attrs.evolve(params, head=torch.zeros_like(params.head)),
        attrs.evolve(params, norm=torch.zeros_like(params.norm)),
        attrs.evolve(params, embed=torch.full_like(params.embed, torch.nan)),
    ):
        with pytest.raises(ps.CheckpointError, match="logits"):
            check_output(attrs.evolve(COMPRESSING, params=broken))
