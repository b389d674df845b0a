"""``purestep profile``: every part of a step is named once, and measuring changes nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path

import purestep as ps
import pytest
from kit.models import tiny_model
from purestep.serving.cli import app
from purestep.serving.profile import _timed_step, filled_state, profile_step, profile_table
from rich.console import Console
from typer.testing import CliRunner

MODEL = tiny_model((0, 4, 128, 4))


def test_parts_of_a_step_are_named_by_kind_of_layer() -> None:
    """Each stage appears with all the calls of its kind of layer, and what is counted is the whole step."""
    state = filled_state(MODEL, 3, 140, room=8)
    found = profile_step(MODEL, state, 3, warmup=1)
    calls = {(stage.name, stage.kind): stage.calls for stage in found.stages}
    kinds = {"window": 1, "C4": 2, "C128": 1}
    for name in ("streams", "attn.input", "attn.heads", "attn.output", "ffn.streams", "ffn.input", "ffn.output"):
        assert {kind: calls[name, kind] for kind in kinds} == kinds
    assert calls["attn.picks", "C4"] == 2
    assert ("attn.picks", "window") not in calls
    around = ("prepare", "forward_batch", "final.streams", "head", "sample", "commit")
    assert [calls[name, ""] for name in around] == [1] * 6
    assert (found.batch, found.context, found.steps) == (3, 140, 3)
    assert all(stage.ms >= 0 for stage in found.stages)
    assert 0 < found.host_share < 1


def test_the_step_that_is_measured_is_a_decode_step() -> None:
    """The pieces between the clocks give the state that ``decode_step`` gives, and the input stays as it was."""
    state = filled_state(MODEL, 2, 130, room=8)
    before = [request.tokens.tolist() for request in state.requests]
    measured, _ = _timed_step(MODEL, state)
    plain, _ = ps.decode_step(MODEL, state)
    assert [r.tokens.tolist() for r in measured.requests] == [r.tokens.tolist() for r in plain.requests]
    assert [r.tokens.tolist() for r in state.requests] == before
    assert measured.launched is None
    assert not ps.invariants.check(measured)


def test_table_says_where_the_time_goes() -> None:
    """Every stage has a line that says what it does."""
    found = profile_step(MODEL, filled_state(MODEL, 1, 5, room=8), 1)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(profile_table(found))
    text = console.export_text()
    assert "One decode step of 1 requests at 5 tokens" in text
    assert text.count("output projection") == 3


@pytest.mark.parametrize(
    ("batch", "context", "field"),
    [(0, 4, "batch"), (1, 0, "context"), (1, MODEL.config.max_position_embeddings, "context")],
)
def test_what_cannot_be_filled_is_refused(batch: int, context: int, field: str) -> None:
    """No request, no token, or more than the model holds is one error that names the argument."""
    with pytest.raises(ps.RequestError, match=f"{field}: expected") as caught:
        filled_state(MODEL, batch, context, room=8)
    assert caught.value.field == field


def test_no_steps_are_refused() -> None:
    """There is no median of nothing."""
    with pytest.raises(ps.RequestError, match="steps: expected at least 1, got 0"):
        profile_step(MODEL, filled_state(MODEL, 1, 4, room=4), 0)


def test_command_writes_json_and_a_trace(tmp_path: Path) -> None:
    """One line of JSON goes to standard output; the trace holds the operators of a step."""
    trace = tmp_path / "step.json"
    arguments = ["profile", "--batch", "2", "--context", "20", "--steps", "1", "--json", "--trace", str(trace)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["batch"], found["context"], found["steps"]) == (2, 20, 1)
    assert {"prepare", "head", "commit"} <= {stage["name"] for stage in found["stages"]}
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::mm" in names
