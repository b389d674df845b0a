"""What users get wrong at the border: one clear error, or the obvious answer, and never a changed state."""

from __future__ import annotations

from typing import Any

import numpy as np
import purestep as ps
import pytest
import torch
from kit.checkpoints import random_tensors
from kit.configs import tiny_config
from kit.engine import GREEDY, engine_model

CONFIG = tiny_config(ratios=(0, 4, 128), window=8)
MODEL = engine_model(CONFIG, random_tensors(CONFIG, seed=2))


@pytest.fixture
def state() -> ps.DecodeState:
    """Two running requests and one without tokens."""
    state = ps.init_state(MODEL, ps.Capacity(4, 512, 256), page_size=8)
    for _ in range(3):
        state, _ = ps.open_request(state, GREEDY)
    return ps.extend_step(MODEL, state, {1: [1, 2, 3], 2: [4]})[0]


def test_steps_without_rows_change_nothing(state: ps.DecodeState) -> None:
    """A step that has nothing to run returns its input and an empty output."""
    fresh = ps.init_state(MODEL, ps.Capacity(1, 64, 64))
    for before, step in (
        (fresh, lambda: ps.decode_step(MODEL, fresh)),
        (state, lambda: ps.decode_step(MODEL, state, only=[])),
        (state, lambda: ps.extend_step(MODEL, state, {})),
        (state, lambda: ps.extend_step(MODEL, state, {}, sample=False, logits="all")),
    ):
        after, out = step()
        assert after is before
        assert out.request_ids == out.next_token_ids == ()
        assert out.logits.shape == (0, CONFIG["vocab_size"])


@pytest.mark.parametrize(
    "tokens",
    [
        *(None, [0], {"a": [1]}, {9: [1]}, {0: []}, {torch.tensor(0): [1], 0: [2]}, {0: None}, {0: 5}, {0: "ab"}),
        *({0: [[1], [2, 3]]}, {0: [[1, 2]]}, {0: [True, 5]}, {0: [1.5]}, {0: [64]}, {0: [-1]}, {0: torch.ones(2)}),
        *({0: torch.ones(2, dtype=torch.bfloat16)}, {0: torch.ones(2, device="meta")}),
    ],
    ids=str,
)
def test_bad_chunks_are_request_errors(state: ps.DecodeState, tokens: Any) -> None:
    """Whatever is no chunk of token ids of open requests is a RequestError, and the state goes on."""
    with pytest.raises(ps.RequestError):
        ps.extend_step(MODEL, state, tokens)
    assert ps.invariants.check(state) == ()
    ps.decode_step(MODEL, state)


@pytest.mark.parametrize(
    "options",
    [
        *({"only": 1}, {"only": [[1]]}, {"only": [1, 1]}, {"only": torch.tensor([1, 1])}, {"only": [0]}, {"only": [7]}),
        *({"force": [1]}, {"force": {1: [1, [2]]}}, {"force": {7: 1}}, {"force": {1: 64}}),
        {"only": [1], "force": {2: 1}},
    ],
    ids=str,
)
def test_bad_decodes_are_request_errors(state: ps.DecodeState, options: Any) -> None:
    """Unknown, repeated, tokenless or misnamed requests of a decode are RequestErrors."""
    with pytest.raises(ps.RequestError):
        ps.decode_step(MODEL, state, **options)


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2], np.uint16), torch.tensor([1, 2], dtype=torch.int32)])
def test_any_flat_integers_are_token_ids(state: ps.DecodeState, ids: Any) -> None:
    """Lists, tuples, arrays and tensors of integers feed the same tokens."""
    _, out = ps.extend_step(MODEL, state, {0: ids})
    _, plain = ps.extend_step(MODEL, state, {0: [1, 2]})
    assert torch.equal(out.logits, plain.logits)


def test_forced_rows_come_in_order_of_opening(state: ps.DecodeState) -> None:
    """Without ``only`` the rows are in order of opening, a forced request without a pending token included."""
    _, out = ps.decode_step(MODEL, state, force={0: 5})
    assert out.request_ids == (0, 1, 2)


def test_default_c128_pool_never_runs_out_first() -> None:
    """Forks that each finish their copy of a C128 page and open another fit into the default pool."""
    state = ps.init_state(MODEL, ps.Capacity(4, 4096, 2300), page_size=128)
    state, a = ps.open_request(state, GREEDY)
    state, _ = ps.extend_step(MODEL, state, {a: [i % 60 for i in range(2047)]}, sample=False)
    forks = [a]
    for _ in range(3):
        state, fork = ps.fork_request(state, a)
        forks.append(fork)
    state, _ = ps.extend_step(MODEL, state, dict.fromkeys(forks, [7] * 129), sample=False)
    assert ps.invariants.check(state) == ()


def test_other_border_errors(state: ps.DecodeState) -> None:
    """Seeds, parameters, sampled ids and options of the wrong kind are typed errors."""
    for seed in (1.5, "x", None, True, -1, 2**80):
        with pytest.raises(ps.ConfigError, match="seed"):
            ps.init_state(MODEL, ps.Capacity(1, 64, 64), seed=seed)
    with pytest.raises(ps.RequestError, match="SamplingParams"):
        ps.open_request(state, 5)
    stops = tuple(i for i in range(64) if i not in MODEL.config.eos_token_id)
    with pytest.raises(ps.RequestError, match="every token"):
        ps.open_request(state, ps.SamplingParams(stop_token_ids=stops, min_new_tokens=3))
    with pytest.raises(ps.RequestError, match="max_new_tokens"):
        ps.fork_request(state, 1, sampling=ps.SamplingParams(max_new_tokens=1))
    launched, batch = ps.prepare_decode(state)
    for ids in (torch.tensor([1]), torch.tensor([1.0, 2.0])):
        with pytest.raises(ps.ShapeError):
            ps.relay(launched, batch, ids)
        with pytest.raises(ps.ShapeError):
            ps.commit(launched, ids)
    with pytest.raises(ps.RequestError, match="commit"):
        ps.commit(launched, torch.tensor([1, 64]))
    with pytest.raises(ps.RequestError, match="logits"):
        ps.forward(MODEL, launched.kv, ps.forward_batch(launched, batch), logits="bogus")


def test_states_of_empty_requests_are_saved(state: ps.DecodeState, tmp_path: Any) -> None:
    """A request that was opened and not fed survives a save; a file in the folder's place is refused."""
    ps.save_state(state, tmp_path / "s")
    restored = ps.restore_state(MODEL, tmp_path / "s")
    assert [len(r.tokens) for r in restored.requests] == [0, 4, 2]
    (tmp_path / "file").write_text("")
    with pytest.raises(ps.CheckpointError, match="folder"):
        ps.save_state(state, tmp_path / "file")
