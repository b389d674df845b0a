"""Saved states and exported requests go on to the same bits, and files that are not sound are refused."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.checkpoints import random_tensors
from kit.configs import tiny_config
from kit.engine import engine_model, random_ids
from purestep.step.container import seal

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
    return ps.fork_request(state, b)[0]  # shares its parent's counts


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
    with pytest.raises(ps.CheckpointError, match="dtype float32"):
        ps.restore_state(engine_model(CONFIG, random_tensors(CONFIG, 1), dtype="bfloat16"), saved)
    records = json.loads((saved / "state.json").read_text())
    (tmp_path / "state.safetensors").write_bytes((saved / "state.safetensors").read_bytes())
    for change in ({"capacity": {**records["capacity"], "tokens": 10**12}}, {"format": 1}):
        changed = records | change
        (tmp_path / "state.json").write_text(json.dumps(seal(changed)))
        with pytest.raises((ps.CheckpointError, ps.CapacityError)):
            ps.restore_state(MODEL, tmp_path)


def test_launched_state_is_not_saved(tmp_path: Path) -> None:
    """A state with an uncommitted step is refused, and nothing is written."""
    launched, _ = ps.prepare_decode(_state(5))
    with pytest.raises(ps.StateBusyError):
        ps.save_state(launched, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_other_weights_and_numerics_are_refused(saved: Path) -> None:
    """PFX-13: a state of other weights or other numerics is refused by name; the model's own states are untouched."""
    live = _state()
    mark = ps.invariants.digest(live)
    with pytest.raises(ps.CheckpointError, match="other weights"):
        ps.restore_state(engine_model(CONFIG, random_tensors(CONFIG, seed=2)), saved)
    rounded = engine_model(CONFIG, random_tensors(CONFIG, seed=1), numerics=ps.Numerics.official())
    with pytest.raises(ps.CheckpointError, match="other numerics"):
        ps.restore_state(rounded, saved)
    with pytest.raises(ps.ConfigError, match="numerics"):
        ps.decode_step(rounded, live)
    reference = engine_model(CONFIG, random_tensors(CONFIG, seed=1), kernels="reference")
    assert ps.decode_step(reference, ps.restore_state(reference, saved))[1].request_ids == (0, 1, 3, 4)
    assert ps.invariants.digest(live) == mark


def test_absurd_headers_are_refused(saved: Path, tmp_path: Path) -> None:
    """A header that claims 10^12 tokens is refused before memory is taken, in either file format."""
    for change in ("shape", "offsets"):
        content = (saved / "state.safetensors").read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        entry = header["request.0.tokens"]
        if change == "shape":
            entry["shape"] = [10**12]
        else:
            entry["data_offsets"] = [entry["data_offsets"][0], entry["data_offsets"][0] + 8 * 10**12]
        raw = json.dumps(header).encode()
        (tmp_path / "state.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + size :])
        (tmp_path / "state.json").write_bytes((saved / "state.json").read_bytes())
        with pytest.raises(ps.CheckpointError):
            ps.restore_state(MODEL, tmp_path)


def test_records_that_contradict_each_other_are_refused(saved: Path, tmp_path: Path) -> None:
    """Records that are whole, sealed and wrong make no state: lengths, rows, free pages and ids are checked."""
    (tmp_path / "state.safetensors").write_bytes((saved / "state.safetensors").read_bytes())
    records = json.loads((saved / "state.json").read_text())

    def with_request(**changes: object) -> dict[str, object]:
        first, *others = records["requests"]
        return records | {"requests": [first | changes, *others]}

    changed = [
        with_request(kv_len=10**6),
        with_request(kv_len=3),
        with_request(row=2),
        with_request(row=77),
        with_request(request_id=9),
        with_request(colour="red"),
        with_request(kv_len="5"),
        with_request(decode_count="z"),
        with_request(finished=5),
        records | {"seed": -5},
        records | {"seed": "a"},
        records | {"model": {}},
        {name: entry for name, entry in records.items() if name != "parts"},
        records | {"requests": records["requests"][1:]},
        records | {"next_id": 0},
        records | {"page_size": 4},
        records | {"free": {**records["free"], "free_pages": records["free"]["free_rows"]}},
        records | {"capacity": {"requests": 4}},
        records | {"sampling": []},
    ]
    for wrong in changed:
        (tmp_path / "state.json").write_text(json.dumps(seal(wrong)))
        with pytest.raises(ps.PurestepError):
            ps.restore_state(MODEL, tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("request.0.tokens", "F64", None),
        ("request.1.output_counts", "F32", None),
        ("request.1.prompt_seen", "U8", None),
        ("request.1.prompt_seen", None, [64, 1]),
        ("kv.swa", None, "reversed"),
    ],
)
def test_headers_that_read_the_bytes_differently_are_refused(
    saved: Path, tmp_path: Path, name: str, dtype: str | None, shape: object
) -> None:
    """The same bytes under another dtype or shape are altered tensors."""
    content = (saved / "state.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    entry = header[name]
    entry["dtype"] = dtype or entry["dtype"]
    entry["shape"] = entry["shape"][::-1] if shape == "reversed" else shape or entry["shape"]
    raw = json.dumps(header).encode()
    (tmp_path / "state.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + size :])
    (tmp_path / "state.json").write_bytes((saved / "state.json").read_bytes())
    with pytest.raises(ps.CheckpointError):
        ps.restore_state(MODEL, tmp_path)


def test_what_cannot_be_saved_or_imported_is_refused(tmp_path: Path) -> None:
    """A path below a file, and what is no exported request, are typed errors."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ps.CheckpointError, match="folder"):
            ps.save_state(_state(), path)
    with pytest.raises(ps.RequestError, match="ExportedRequest"):
        ps.import_request(_state(), None)


def test_files_grow_with_what_is_in_use(tmp_path: Path) -> None:
    """A pool a hundred times larger makes a saved state no larger."""
    sizes = []
    for scale in (1, 100):
        state = ps.init_state(MODEL, ps.Capacity(4, 1024 * scale, 512), page_size=8)
        state, a = ps.open_request(state)
        state, _ = ps.extend_step(MODEL, state, {a: random_ids(100, 64)})
        ps.save_state(state, tmp_path / str(scale))
        sizes.append(sum(file.stat().st_size for file in (tmp_path / str(scale)).iterdir()))
    assert sizes[1] < sizes[0] + 200


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an exported request."""
    folder = tmp_path_factory.mktemp("exported")
    ps.save_request(ps.export_request(_state(), 1), folder)
    return folder


@given(data=st.data())
def test_damaged_requests_are_refused(
    exported: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """PFX-11: a flipped byte or a cut anywhere in a request's files is a CheckpointError."""
    folder = tmp_path_factory.mktemp("damaged")
    name = data.draw(st.sampled_from(["request.json", "request.safetensors"]))
    for file in exported.iterdir():
        content = bytearray(file.read_bytes())
        if file.name == name:
            if data.draw(st.booleans()):
                content = content[: data.draw(st.integers(0, len(content) - 1))]
            else:
                content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        (folder / file.name).write_bytes(content)
    try:
        loaded = ps.load_request(folder)
    except ps.CheckpointError:
        return
    assert name == "request.json"  # white space between the records
    assert loaded.request.tokens == ps.load_request(exported).request.tokens


@given(page_size=st.sampled_from((4, 8, 12, 128)), n_tokens=st.sampled_from((1, 3, 127, 128, 140, 260)))
def test_an_imported_request_goes_on_as_it_would_have(page_size: int, n_tokens: int) -> None:
    """Into another batch and page size, with penalties and a seed of its own: same tokens as without the move."""
    home = _state(n_tokens)
    state = ps.init_state(MODEL, ps.Capacity(3, 2048, 600), page_size=page_size, seed=77)
    state, other = ps.open_request(state)
    state, _ = ps.extend_step(MODEL, state, {other: [9, 8, 7]})
    names = {}
    for request in (1, 0):
        state, new = ps.import_request(state, ps.export_request(home, request))
        names[request] = new
    assert ps.invariants.check(state) == ()
    for _ in range(6):
        home, out = ps.decode_step(MODEL, home)
        state, moved = ps.decode_step(MODEL, state)
        for request, new in names.items():
            a, b = out.request_ids.index(request), moved.request_ids.index(new)
            torch.testing.assert_close(out.logits[a], moved.logits[b], atol=1e-4, rtol=0)
            assert out.next_token_ids[a] == moved.next_token_ids[b]
    assert ps.invariants.check(state) == ()


def test_requests_that_do_not_fit_are_refused() -> None:
    """Too long, no pages, no row, another model, parts that contradict each other: typed, and nothing changes."""
    value = ps.export_request(_state(), 0)
    n = len(value.request.tokens)
    for capacity in (ps.Capacity(1, 1024, n - 1), ps.Capacity(1, n // 2, 512), ps.Capacity(1, 1024, 512, swa_tokens=8)):
        state = ps.init_state(MODEL, capacity, page_size=8)
        mark = ps.invariants.digest(state)
        with pytest.raises(ps.CapacityError):
            ps.import_request(state, value)
        assert ps.invariants.digest(state) == mark
    state, _ = ps.open_request(ps.init_state(MODEL, ps.Capacity(1, 1024, 512)))
    with pytest.raises(ps.CapacityError, match="requests"):
        ps.import_request(state, value)
    state = ps.init_state(MODEL, ps.Capacity(1, 1024, 512))
    other = engine_model(CONFIG, random_tensors(CONFIG, seed=2))
    with pytest.raises(ps.CheckpointError, match="other weights"):
        ps.import_request(ps.init_state(other, ps.Capacity(1, 1024, 512)), value)
    request = value.request
    for broken in (
        attrs.evolve(value, caches={}),
        attrs.evolve(value, caches={**value.caches, "swa": value.caches["swa"][:, 1:]}),
        attrs.evolve(value, caches={**value.caches, "c4": value.caches["c4"].double()}),
        attrs.evolve(value, request=attrs.evolve(request, kv_len=request.kv_len - 1)),
        attrs.evolve(value, request=attrs.evolve(request, evicted_len=request.kv_len)),
        attrs.evolve(value, request=attrs.evolve(request, tokens=request.tokens.replace_last(10**9))),
        attrs.evolve(value, request=attrs.evolve(request, output_positions=request.output_positions.append(3))),
        attrs.evolve(value, sampling=attrs.evolve(value.sampling, n_outputs=99)),
    ):
        with pytest.raises(ps.CheckpointError, match="belong together"):
            ps.import_request(state, broken)
    launched, _ = ps.prepare_decode(_state(5))
    with pytest.raises(ps.StateBusyError):
        ps.export_request(launched, 0)
