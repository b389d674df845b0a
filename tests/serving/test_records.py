"""The commands that record runs and compare them: what they write, print and exit with."""

from __future__ import annotations

from pathlib import Path

import attrs
import purestep as ps
import pytest
import torch
from purestep.serving.cli import app
from purestep.serving.records import record_run
from purestep.state.capacity import Capacity
from typer.testing import CliRunner, Result

PROMPTS = ("In the beginning was", "The cat")
EXACT = ("--dtype", "float32", "--invariant", "--new-tokens", "3")
MODEL = ps.load_model("tiny", dtype="float32")


def cli(*args: object, stdin: str | None = None) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin, prog_name="purestep")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs: both prompts together, the second alone in small chunks, and both in other arithmetic."""
    made = tmp_path_factory.mktemp("runs")
    for result in (
        cli("record", *PROMPTS, made / "batch", *EXACT, "--chunk", 4),
        cli("record", PROMPTS[1], made / "alone", *EXACT, "--chunk", 1),
        cli("record", *PROMPTS, made / "fused", "--dtype", "float32", "--new-tokens", 3),
    ):
        assert (result.exit_code, result.stdout) == (0, "")
    return made


def test_record_writes_what_the_steps_captured(folder: Path) -> None:
    """Every token that was fed is in the run once, the sampled ones included, with all stages."""
    run = ps.load_run(folder / "batch")
    n_prompts = [len(MODEL.tokenizer.encode(prompt, add_special_tokens=False)) + 1 for prompt in PROMPTS]
    tokens = [token for record in run for token in zip(record.request_ids, record.positions, strict=True)]
    assert sorted(tokens) == [(request, at) for request, n in enumerate(n_prompts) for at in range(n + 2)]
    assert {"0.streams", "1.attn.picks", "3.ffn.expert_ids", "final.streams"} <= run[0].stages.keys()
    assert [len(record.logit_rows) for record in run[-3:]] == [2, 2, 2]


def test_record_equals_the_function(tmp_path: Path) -> None:
    """The command keeps the stages, dtype, kernels and seed that it is given."""
    flags = "--dtype float32 --kernels reference --stages attn.input,2.streams --new-tokens 4 --chunk 3 --seed 7"
    assert cli("record", *PROMPTS, tmp_path, *flags.split()).exit_code == 0
    model = ps.load_model("tiny", dtype="float32", kernels="reference")
    ids = [[0, *model.tokenizer.encode(prompt, add_special_tokens=False).ids] for prompt in PROMPTS]
    made = record_run(model, ids, stages=("attn.input", "2.streams"), new_tokens=4, chunk=3, seed=7)
    found = ps.load_run(tmp_path)
    assert [record.positions for record in found] == [record.positions for record in made]
    assert found[0].stages.keys() == {*(f"{layer}.attn.input" for layer in range(4)), "2.streams"}
    assert ps.first_difference(found, made) is None


@pytest.mark.parametrize(("new_tokens", "chunk", "n_steps"), [(1, 64, 1), (4, 2, 6), (2, 5, 2)])
def test_all_prompts_end_in_one_step(new_tokens: int, chunk: int, n_steps: int) -> None:
    """Prefill takes as many steps as the longest prompt needs, every request samples in the last of them."""
    calls: list[tuple[int, int]] = []
    prompts = ([5, 6, 7, 8, 9], [5, 6])
    run = record_run(
        MODEL,
        prompts,
        stages=["final.streams"],
        new_tokens=new_tokens,
        chunk=chunk,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(done, n_steps) for done in range(1, n_steps + 1)]
    assert len(run) == n_steps
    assert run[n_steps - new_tokens].positions[-1] == 1
    assert run[-1].request_ids[-1] == 1


def test_record_equals_steps_by_hand() -> None:
    """A recorded run has the bits of extend and decode steps that a caller makes."""
    made = record_run(MODEL, [[5, 6, 7], [8]], stages=["attn.output"], new_tokens=2, chunk=8)
    state = ps.init_state(MODEL, Capacity(requests=2, tokens=256, context=8))
    for _ in range(2):
        state, _ = ps.open_request(state, ps.SamplingParams(temperature=0))
    state, first = ps.extend_step(MODEL, state, {0: [5, 6, 7], 1: [8]}, capture=["attn.output"])
    _, second = ps.decode_step(MODEL, state, capture=["attn.output"])
    for record, out in zip(made, (first, second), strict=True):
        assert torch.equal(record.logits, out.logits)
        assert record.stages.keys() == out.captured.stages.keys()
        assert all(torch.equal(x, out.captured.stages[name]) for name, x in record.stages.items())


def test_record_reads_a_prompt_from_standard_input(folder: Path, tmp_path: Path) -> None:
    """ "-" is standard input, as for other commands."""
    assert cli("record", "-", tmp_path, *EXACT, stdin=PROMPTS[1]).exit_code == 0
    assert ps.first_difference(ps.load_run(folder / "alone"), ps.load_run(tmp_path)) is None


def test_a_recorded_run_is_replaced_only_on_request(folder: Path, tmp_path: Path) -> None:
    """A folder with files is refused before anything is loaded, and stays as it is; --overwrite replaces the run."""
    run = tmp_path / "run"
    assert cli("record", PROMPTS[1], run, *EXACT).exit_code == 0
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    refused = cli("record", *PROMPTS, run, *EXACT, "--dtype", "never")
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert all(words in refused.stderr for words in ("OUT", str(run), "--overwrite"))
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before
    assert cli("record", *PROMPTS, run, *EXACT, "--chunk", 4, "--overwrite").exit_code == 0
    assert ps.first_difference(ps.load_run(folder / "batch"), ps.load_run(run)) is None


def test_diff_of_equal_runs(folder: Path) -> None:
    """A run and itself, or a request alone and in a batch in exact arithmetic: exit code 0, and it is said."""
    for args in (("batch", "batch"), ("batch", "alone", "--map", "1:0"), ("alone", "batch", "--map", "0:1")):
        result = cli("diff", folder / args[0], folder / args[1], *args[2:])
        assert result.exit_code == 0
        assert result.stdout.endswith("no difference\n")
    assert "0 with 1" in result.stdout
    assert "attn.picks 1, 3" in result.stdout


def test_diff_of_different_runs(folder: Path) -> None:
    """Other arithmetic: exit code 1 and the numbers of ``first_difference``; within a tolerance exit code 0."""
    runs = folder / "batch", folder / "fused"
    found = ps.first_difference(*map(ps.load_run, runs))
    assert found is not None
    result = cli("diff", *runs)
    assert result.exit_code == 1
    for shown in (found.stage, f"{found.shape}", f"{found.value_a:.9g}", f"{found.value_b:.9g}", f"{found.n_before:,}"):
        assert shown in result.stdout
    assert "no difference" not in result.stdout
    assert cli("diff", *runs, "--atol", "1e-3", "--rtol", "1e-3").exit_code == 0


def test_diff_says_when_other_tokens_were_fed(folder: Path) -> None:
    """Requests with other texts part at the embedding, and the command asks whether that was meant."""
    result = cli("diff", folder / "batch", folder / "batch", "--map", "0:1")
    assert result.exit_code == 1
    assert "same tokens" in result.stdout


WRONG = {
    "unknown stage": (["record", "a", "{new}", "--stages", "attn.inptu"], "attn.inptu"),
    "unknown layer": (["record", "a", "{new}", "--stages", "9.streams"], r"9.streams"),
    "no new tokens": (["record", "a", "{new}", "--new-tokens", "0"], "new-tokens"),
    "no chunk": (["record", "a", "{new}", "--chunk", "0"], "chunk"),
    "empty prompt": (["record", "", "{new}"], "some text"),
    "no folder": (["record", "a"], "Missing argument"),
    "out is a file": (["record", "a", "{file}"], "folder to write to"),
    "fused is not invariant": (["record", "a", "{new}", "--kernels", "fused", "--invariant"], "row-independent"),
    "no such run": (["diff", "{batch}", "{new}"], "saved run"),
    "damaged run": (["diff", "{batch}", "{damaged}"], "save it again"),
    "one run": (["diff", "{batch}"], "Missing argument"),
    "no pair": (["diff", "{batch}", "{batch}", "--map", "0"], "pairs like 0:1"),
    "a request twice": (["diff", "{batch}", "{batch}", "--map", "0:1", "--map", "0:0"], "once"),
    "unknown request": (["diff", "{batch}", "{batch}", "--map", "0:7"], "got 7"),
    "negative tolerance": (["diff", "{batch}", "{batch}", "--atol", "-1"], "atol"),
    "tolerance nan": (["diff", "{batch}", "{batch}", "--rtol", "nan"], "rtol"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_told_with_exit_code_2(folder: Path, tmp_path: Path, case: str) -> None:
    """One line on standard error, nothing on standard output, and never the exit code of a difference."""
    args, message = WRONG[case]
    (tmp_path / "file").write_text("")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in (folder / "batch").iterdir():
        (damaged / file.name).write_bytes(file.read_bytes()[:-5])
    names = {"new": tmp_path / "new", "file": tmp_path / "file", "batch": folder / "batch", "damaged": damaged}
    result = cli(*(arg.format(**names) for arg in args))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_an_escaped_name_is_shown_as_it_is(folder: Path, tmp_path: Path) -> None:
    """A folder whose name looks like markup is printed as it is."""
    odd = tmp_path / "[bold]run"
    ps.save_run([attrs.evolve(record, stages={}) for record in ps.load_run(folder / "alone")], odd)
    result = cli("diff", odd, odd)
    assert result.exit_code == 0
    assert "[bold]" in "".join(result.stdout.split())
