"""``purestep bench``: both engines compute the same thing, and the floor is the sum of what must be read."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import purestep as ps
import pytest
import torch
from purestep.serving.bench_cases import CASES, floor_of
from purestep.serving.bench_decode import Timing, bench_table, draw_timings, time_decode
from purestep.serving.bench_peer import load_peer, peer_cache
from purestep.serving.bench_steps import laid_state, our_step, write_case
from purestep.serving.cli import app
from purestep.state.released import RELEASED
from transformers import DynamicCache
from typer.testing import CliRunner

TOY = attrs.evolve(RELEASED["toy"], num_hidden_layers=3, compress_ratios=(0, 4, 128))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("case")
    write_case(TOY, "float32", folder)
    return folder


def test_both_engines_load_the_same_weights(folder: Path) -> None:
    """From one folder, this package and transformers give the same logits, so that their times can be compared."""
    model, peer = ps.load_model(folder, numerics=ps.Numerics.transformers()), load_peer(folder, torch.float32)
    ids = torch.arange(1, 41)
    state = ps.init_state(model, ps.Capacity(1, 128, 64))
    state, request = ps.open_request(state, ps.SamplingParams(temperature=0))
    _, out = ps.extend_step(model, state, {request: ids}, logits="all")
    with torch.no_grad():
        expected = peer(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    torch.testing.assert_close(out.logits, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("context", [3, 7, 130, 300])
def test_the_peer_is_laid_out_as_its_prefill_leaves_it(folder: Path, context: int) -> None:
    """Every part of the synthetic cache has the shape and the count that a real prefill gives it."""
    peer = load_peer(folder, torch.float32)
    real = DynamicCache(config=peer.config)
    with torch.no_grad():
        peer(input_ids=torch.arange(context).remainder(TOY.vocab_size).expand(2, -1), cache=real, use_cache=True)
    for ours, theirs in zip(peer_cache(peer, 2, context).layers, real.layers, strict=True):
        assert ours.keys.shape == theirs.keys.shape
        assert ours.cumulative_length == theirs.cumulative_length
        for part in ("compressed_kv", "buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate"):
            found, expected = getattr(ours, part, {}), getattr(theirs, part, {})
            shapes = {name: tensor.shape for name, tensor in found.items() if tensor is not None and tensor.numel()}
            wanted = {name: tensor.shape for name, tensor in expected.items() if tensor is not None and tensor.numel()}
            assert shapes == wanted, part
        assert getattr(ours, "entry_count", {}) == getattr(theirs, "entry_count", {})


@pytest.mark.parametrize("context", [5, 200])
def test_a_laid_state_is_a_sound_state_that_steps(folder: Path, context: int) -> None:
    """Slots, lengths and tables are those of a prefill; the state decodes on, and pools may be larger than needed."""
    model = ps.load_model(folder)
    for pool_scale in (1, 3):
        state, requests = laid_state(model, 2, context, room=8, pool_scale=pool_scale)
        assert [request.kv_len for request in state.requests] == [context] * 2
        assert state.table.sizes.pages >= pool_scale * 2 * (context // 128)
        out = our_step(model, state, requests)()
        assert isinstance(out, ps.StepOutput)
        assert bool(out.logits.isfinite().all())


def test_floor_of_a_case_by_hand() -> None:
    """Bytes and FLOPs of a step equal a count layer by layer from the numbers of the case."""
    c, batch, context, size = CASES["small"], 4, 1024, 2
    h, d, n, f = c.hidden_size, c.head_dim, c.num_attention_heads, c.moe_intermediate_size
    hit = c.n_routed_experts * (1 - (1 - c.num_experts_per_tok / c.n_routed_experts) ** batch)
    weights = streams = keys = products = active = 0.0
    for ratio in c.compress_ratios:
        attention = h * c.q_lora_rank + c.q_lora_rank * n * d + h * d
        attention += n * d * c.o_lora_rank + c.o_groups * c.o_lora_rank * h
        compressor = {0: 0, 4: 2 * h * 2 * d, 128: 2 * h * d}[ratio]
        indexer = 0
        if ratio == 4:
            k = c.index_head_dim
            indexer = 2 * h * 2 * k + c.q_lora_rank * c.index_n_heads * k + h * c.index_n_heads
        dense = attention + compressor + indexer + c.n_routed_experts * h + 3 * h * f
        weights += dense + hit * 3 * h * f
        streams += 2 * (2 + c.hc_mult) * c.hc_mult * c.hc_mult * h
        active += dense + c.num_experts_per_tok * 3 * h * f
        entries = context // ratio if ratio else 0
        if ratio == 4:
            keys += entries * c.index_head_dim
            products += entries * c.index_head_dim * c.index_n_heads
            entries = min(entries, c.index_topk)
        keys += (128 + entries) * d
        products += 2 * (128 + entries) * d * n
    weights += c.vocab_size * h
    active += c.vocab_size * h
    found = floor_of(c, batch, context, size)
    # Norms, biases, sinks and the like are counted too, and are less than a hundredth.
    assert found.n_bytes == pytest.approx(weights * size + streams * 4 + batch * keys * size, rel=0.01)
    assert found.flops == pytest.approx(2 * batch * (active + streams + products), rel=0.01)


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_timings_of_every_combination(monkeypatch: pytest.MonkeyPatch, is_compiled: bool) -> None:
    """Each (batch, context) gives one row whose ratios are those of its own numbers; progress counts to the end."""
    monkeypatch.setitem(CASES, "toy", TOY)
    seen = []
    found = list(
        time_decode(
            "toy",
            "float32",
            batches=(1, 3),
            contexts=(4, 130),
            rounds=1,
            is_compiled=is_compiled,
            pool_scale=2,
            progress=lambda done, total: seen.append((done, total)),
        )
    )
    assert [(one.context, one.batch) for one in found] == [(4, 1), (4, 3), (130, 1), (130, 3)]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    for one in found:
        assert one.tokens_per_s == pytest.approx(one.batch / one.ms * 1e3)
        assert (one.eager_ms is not None) == is_compiled
        assert one.over_floor == pytest.approx(one.ms / one.floor_ms)
        assert one.peer_ms is not None
        assert one.speed_up == pytest.approx(one.peer_ms / one.ms)
        assert one.scaled_ms is not None
    assert bench_table(found, 1, 1).row_count == 4


def _timing(**fields: object) -> Timing:
    numbers = {"ms": 2.0, "tokens_per_s": 500.0, "floor_ms": 1.0, "over_floor": 2.0}
    return Timing(**({"case": "toy", "dtype": "float32", "batch": 1, "context": 4} | numbers | fields))


@pytest.mark.parametrize("ending", ["png", "svg"])
@pytest.mark.parametrize("peer_ms", [None, 3.0])
def test_pictures(tmp_path: Path, ending: str, peer_ms: float | None) -> None:
    """A picture is written with and without a peer; an unknown format is one error that names the argument."""
    found = [_timing(batch=batch, context=context, peer_ms=peer_ms) for batch in (1, 4) for context in (8, 64)]
    draw_timings(found, tmp_path / f"curves.{ending}")
    assert (tmp_path / f"curves.{ending}").stat().st_size > 1000
    with pytest.raises(ps.ConfigError, match=r"picture: expected a name ending in"):
        draw_timings(found, tmp_path / "curves.xyz")


def test_command_writes_one_line_a_combination() -> None:
    """Standard output has JSON lines alone; what is unknown ends with code 2."""
    arguments = ["bench", "--case", "tiny", "--batch", "2", "--context", "8", "--rounds", "1"]
    arguments += ["--no-peer", "--no-compile"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert (found["case"], found["batch"], found["context"], found["peer_ms"]) == ("tiny", 2, 8, None)
    wrong = CliRunner().invoke(app, ["bench", "--case", "huge", "--no-peer"])
    assert wrong.exit_code == 2
    assert "case: expected one of tiny, small, flash-slice" in wrong.output
