"""Saved and restored states go on to the same bits, and damaged files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.checkpoints import random_tensors
from kit.configs import tiny_config
from kit.engine import engine_model, random_ids
from purestep.step.files import _digest

CONFIG = tiny_config(ratios=(0, 4, 128))
MODEL = engine_model(CONFIG, random_tensors(CONFIG, seed=1))


def _state(n_tokens: int = 140) -> ps.DecodeState:
    """A state with a long request, its fork, a penalised one, one closed in between."""
    state = ps.init_state(MODEL, ps.Capacity(4, 1024, 512), page_size=8, seed=5)
    state, a = ps.open_request(state, ps.SamplingParams(seed=3, ignore_eos=True, logit_bias={1: 2.0}))
    state, b = ps.open_request(state, ps.SamplingParams(frequency_penalty=1.0, ignore_eos=True))
    state, c = ps.open_request(state)
    state, _ = ps.extend_step(MODEL, state, {a: random_ids(n_tokens, 64), b: [1, 2, 3], c: [4]})
    state = ps.close_request(state, c)
    state, _ = ps.fork_request(state, a, sampling=ps.SamplingParams(seed=9, ignore_eos=True))
    return state


@pytest.mark.parametrize("n_tokens", [1, 127, 140])
def test_restored_state_goes_on_identically(tmp_path: Path, n_tokens: int) -> None:
    """Ten steps after a restore give the bits, ids and slots of ten steps without it; the saved state is unchanged."""
    state = _state(n_tokens)
    ps.save_state(state, tmp_path / "s")
    restored = ps.restore_state(MODEL, tmp_path / "s")
    assert ps.invariants.check(restored) == ()
    for _ in range(10):
        state, out = ps.decode_step(MODEL, state)
        restored, again = ps.decode_step(MODEL, restored)
        assert torch.equal(out.logits, again.logits)
        assert out.next_token_ids == again.next_token_ids
    rows = torch.arange(5 * 512)
    assert torch.equal(state.table.handle.rows("req_to_token", rows), restored.table.handle.rows("req_to_token", rows))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved state."""
    folder = tmp_path_factory.mktemp("saved")
    ps.save_state(_state(), folder)
    return folder


@given(data=st.data())
def test_damaged_files_are_refused(saved: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A flipped byte, a cut or an empty file anywhere is a CheckpointError, never another state."""
    folder = tmp_path_factory.mktemp("damaged")
    name = data.draw(st.sampled_from(["state.json", "state.safetensors"]))
    for file in saved.iterdir():
        content = bytearray(file.read_bytes())
        if file.name == name:
            if data.draw(st.booleans()):
                content = content[: data.draw(st.integers(0, len(content) - 1))]
            else:
                content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        (folder / file.name).write_bytes(content)
    try:
        restored = ps.restore_state(MODEL, folder)
    except ps.CheckpointError:
        return
    # Only white space between the records may change unnoticed: they still say the same.
    assert name == "state.json"
    assert restored.requests[0].tokens == _state().requests[0].tokens


def test_foreign_and_absurd_states_are_refused(saved: Path, tmp_path: Path) -> None:
    """Another model, another dtype, an absurd capacity and an unknown format are refused before memory is taken."""
    other = tiny_config(ratios=(0, 4))
    with pytest.raises(ps.CheckpointError, match="another configuration"):
        ps.restore_state(engine_model(other, random_tensors(other, 0)), saved)
    with pytest.raises(ps.CheckpointError, match="bfloat16"):
        ps.restore_state(engine_model(CONFIG, random_tensors(CONFIG, 1), dtype="bfloat16"), saved)
    records = json.loads((saved / "state.json").read_text())
    (tmp_path / "state.safetensors").write_bytes((saved / "state.safetensors").read_bytes())
    for change in ({"capacity": {**records["capacity"], "tokens": 10**12}}, {"format": 2}):
        changed = records | change
        (tmp_path / "state.json").write_text(json.dumps(changed | {"digest": _digest(changed)}))
        with pytest.raises(ps.CheckpointError):
            ps.restore_state(MODEL, tmp_path)


def test_launched_state_is_not_saved(tmp_path: Path) -> None:
    """A state with an uncommitted step is refused, and nothing is written."""
    launched, _ = ps.prepare_decode(_state(5))
    with pytest.raises(ps.StateBusyError):
        ps.save_state(launched, tmp_path / "none")
    assert not (tmp_path / "none").exists()
