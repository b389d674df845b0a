"""``purestep kernels``: what runs each operator here, and the self-test, on simulated machines and on none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from ascend_sim.simulator import PACKAGES, simulate
from purestep.ops.ascend.providers import BINDINGS, Operator, Providers, choose_providers, installed_schemas
from purestep.serving.cli import app
from purestep.serving.kernel_report import CHECKS, Verdict, run_checks
from purestep.serving.kernel_table import kernel_rows, load_packages, usable_providers
from typer.testing import CliRunner

VLLM = ("torch-npu", "vllm-ascend", "sgl-kernel-npu")
MACHINES = [("a3", PACKAGES), ("a3", VLLM), ("a5", PACKAGES)]
IDS = ["a3", "a3-vllm", "a5"]
CPU = torch.device("cpu")


def run(*arguments: str) -> Any:
    """Run the command in this process."""
    return CliRunner().invoke(app, ["kernels", *arguments], catch_exceptions=False, env={"COLUMNS": "200"})


def test_without_packages_it_says_what_is_missing() -> None:
    """Every operator falls back or is plain on purpose, packages are named as missing, and that is no failure."""
    done = run("--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert {found["machine"][name] for name in (*PACKAGES, "vllm-ascend")} == {"not installed"}
    assert {row["operator"] for row in found["operators"]} == {b.operator for b in BINDINGS}
    assert {row["provider"] for row in found["operators"]} == {"torch"}
    assert {row["status"].split(":")[0] for row in found["operators"]} == {"falls back", "plain function"}
    assert found["self_test"] == []
    table = run("--chip", "a5")
    assert table.exit_code == 0
    assert "not installed" in table.stdout
    assert "the kernel is in cann-recipes" in " ".join(table.stdout.split())


def test_self_test_without_packages_is_refused() -> None:
    """Nothing can be checked where nothing is registered: an error that says so."""
    done = run("--self-test")
    assert done.exit_code == 2
    assert "got none registered" in done.stderr


def test_unknown_chips_are_refused() -> None:
    """A chip that no package knows is an error with or without packages."""
    done = run("--chip", "a4")
    assert done.exit_code == 2
    assert "expected one of a2, a3, a5, got 'a4'" in done.stderr


@pytest.mark.parametrize(("chip", "packages"), MACHINES, ids=IDS)
def test_rows_say_what_is_chosen(chip: str, packages: tuple[str, ...]) -> None:
    """The table is the choice that a model would be loaded with."""
    with simulate(chip=chip, providers=packages):
        rows = kernel_rows(chip, installed_schemas())
        providers = choose_providers(chip, installed_schemas())
    assert {row.operator: row.kernel for row in rows} == {
        name: one.binding.qualified_name for name, one in providers.operators.items()
    }
    assert all(row.schema == ("same" if row.kernel else "") and row.chip == chip for row in rows)
    missing = {row.operator for row in rows if row.status.startswith("falls back")}
    assert missing == set(providers.missing)


def test_a_differing_schema_is_one_row() -> None:
    """An operator with another schema is shown as refused; all others are as before."""
    other = "custom::npu_hc_post(Tensor x, Tensor residual, Tensor comb, Tensor post) -> Tensor"
    with simulate():
        before = kernel_rows("a3", installed_schemas())
    with simulate(instead={"custom::npu_hc_post": other}):
        after = kernel_rows("a3", installed_schemas())
        done = run()
    assert done.exit_code == 0
    assert "differs" in done.stdout
    changed = {a.operator: a for a, b in zip(after, before, strict=True) if attrs.astuple(a) != attrs.astuple(b)}
    assert set(changed) == {"update_streams"}
    assert (changed["update_streams"].schema, changed["update_streams"].kernel) == ("differs", "custom::npu_hc_post")
    assert changed["update_streams"].status.startswith("refused")


def test_operators_that_a_build_lacks_are_named() -> None:
    """An operator missing in a build falls back, and the table names the package that has it."""
    with simulate(without=["custom::npu_hc_pre", "custom::npu_sparse_attn_sharedkv_metadata"]):
        rows = {row.operator: row for row in kernel_rows("a3", installed_schemas())}
    for name in ("mix_streams", "attend", "attention_metadata"):
        assert rows[name].status == "falls back: the kernel is in cann-recipes or vllm-ascend"
    assert rows["update_streams"].status == "kernel runs"


def test_a_package_that_cannot_be_imported_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a package complains about on import is shown beside its name; the command goes on."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (problem,) = (one.problem for one in load_packages() if one.name == "torch-npu")
    assert problem == "ImportError: libhccl.so: cannot open shared object file"
    done = run()
    assert done.exit_code == 0
    assert "libhccl.so" in done.stdout


def test_other_commands_import_no_kernel_package(tmp_path: Path) -> None:
    """A kernel package on the machine stays untouched unless it is asked for."""
    (tmp_path / "torch_npu.py").write_text("raise SystemExit('imported')\n")
    code = f"import sys; sys.path[:0] = {[str(tmp_path), *sys.path]!r}\nfrom purestep.serving.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code, "info"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Configuration" in done.stdout


@pytest.mark.parametrize(("chip", "packages"), MACHINES, ids=IDS)
def test_every_kernel_passes_on_the_simulator(chip: str, packages: tuple[str, ...]) -> None:
    """Each check passes within its tolerance, and each kernel has a check or a reason for none."""
    with simulate(chip=chip, providers=packages):
        done = run("--chip", chip, "--self-test", "--json")
        providers = choose_providers(chip, installed_schemas())
    assert done.exit_code == 0, done.stdout
    found = json.loads(done.stdout)
    assert {"purestep", "python", "torch", "CANN", "chip", "device"} <= set(found["machine"])
    verdicts = found["self_test"]
    assert {one["operator"] for one in verdicts} == {n for n in providers.operators if providers.has(n)}
    compared = [one for one in verdicts if one["verdict"] != "not run"]
    assert {one["verdict"] for one in compared} == {"passes"}
    assert all(one["error"] <= one["tolerance"] < 0.2 for one in compared)
    idle = {one["operator"] for one in verdicts if one["verdict"] == "not run"}
    assert idle == {"dispatch", "combine", "attention_metadata", "index_metadata"} | (
        {"write_window"} if chip == "a5" else set()
    )
    assert not any("there is no check of it" in one["detail"] for one in verdicts)


def test_the_report_is_a_table_too() -> None:
    """For people the self-test prints machine, operators and verdicts."""
    with simulate():
        done = run("--self-test")
    assert done.exit_code == 0
    assert all(title in done.stdout for title in ("Machine", "Operators", "Self-test", "passes"))


@attrs.frozen(eq=False, kw_only=True)
class Wrong(Operator):
    """A kernel that gets other arguments than it was given, which is what being wrong looks like from outside."""

    change: Callable[[Mapping[str, Any]], dict[str, Any]]

    def __call__(self, **given: Any) -> Any:
        """Call the operator with changed arguments."""
        return Operator.__call__(self, **{**given, **self.change(given)})


def planted(providers: Providers, operator: str, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Providers:
    """Put a wrong kernel in an operator's place."""
    good = providers[operator]
    wrong = Wrong(binding=good.binding, schema=good.schema, positional=good.positional, change=change)
    return attrs.evolve(providers, operators={**providers.operators, operator: wrong})


def rolled(name: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Give every row of an argument to its neighbour."""
    return lambda given: {name: given[name].roll(1, 0).contiguous()}


def choices_first(given: Mapping[str, Any]) -> dict[str, Any]:
    """Order an index by choice instead of by row."""
    return {"row_idx": given["row_idx"].view(-1, 3).t().contiguous().flatten()}


SWAPPED = {
    "rotate": lambda given: {"cos": given["sin"], "sin": given["cos"]},
    "compress": lambda given: {"cos": given["sin"], "sin": given["cos"]},
}
WRONG: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    **SWAPPED,
    "mix_streams": lambda given: {"n_iters": 1},
    "update_streams": lambda given: {"comb": given["comb"].transpose(-1, -2).contiguous()},
    "rms_norm": lambda given: {"eps": 0.1},
    "quantize_rows": rolled("x"),
    "project_groups": rolled("w"),
    "route": lambda given: {"factor": 1.0},
    "init_routing": rolled("ids"),
    "grouped_matmul": lambda given: {"counts": given["counts"].flip(0)},
    "activate": lambda given: {"limit": 1e6},
    "activate_quantised": lambda given: {"limit": 1e6},
    "combine_rows": choices_first,
    "quantised_linear": rolled("x_scale"),
    "format_weight": rolled("w"),
    "keep_top": lambda given: {"p": 1 - given["p"]},
    "write_rows": lambda given: {"slots": given["slots"] + 1},
    "pick_entries": rolled("weights"),
    "attend": rolled("sinks"),
}
ONLY_A5 = {
    "quantize_groups": rolled("x"),
    "activate_blocks": lambda given: {"limit": 1e6},
    "grouped_matmul": lambda given: {"x": [given["x"][0].roll(1, 0)]},
    "write_index": lambda given: {"slots": given["slots"] + 1},
    "write_window": rolled("rows"),
    "quantize_rows": rolled("x"),
    "project_groups": rolled("w_scale"),
    "compress": SWAPPED["compress"],
}
PLANTED = [("a3", name, change) for name, change in WRONG.items()]
PLANTED += [("a5", name, change) for name, change in ONLY_A5.items()]


def verdicts_of(providers: Providers, operator: str) -> list[Verdict]:
    """Run the checks that call an operator."""
    caller = "attend" if operator == "write_window" else operator
    return list(run_checks(providers, CPU, [check for check in CHECKS if check.operator == caller]))


@pytest.mark.parametrize(("chip", "name", "change"), PLANTED, ids=[f"{p[0]}-{p[1]}" for p in PLANTED])
def test_wrong_kernels_are_reported(chip: str, name: str, change: Callable[..., dict[str, Any]]) -> None:
    """A kernel that does something else fails at least one check of its operator; the right one fails none."""
    with simulate(chip=chip, poison_dummy=False):
        providers = choose_providers(chip, installed_schemas())
        good = [one.verdict for one in verdicts_of(providers, name) if one.case]
        bad = [one.verdict for one in verdicts_of(planted(providers, name, change), name) if one.case]
    assert set(good) == {"passes"}
    assert "fails" in bad


def test_every_checked_operator_has_a_planted_fault() -> None:
    """No check is without a kernel that it is known to catch."""
    assert {check.operator for check in CHECKS} <= {*WRONG, *ONLY_A5}


def test_a_kernel_that_raises_does_not_end_the_report() -> None:
    """An error is one verdict, with what the kernel said; the command then says that something is wrong."""
    with simulate():
        providers = choose_providers("a3", installed_schemas())
        wrong = planted(providers, "update_streams", lambda given: {"x": given["x"].float()})
        (found,) = (one for one in run_checks(wrong, CPU) if one.operator == "update_streams")
    assert found.verdict == "error"
    assert "x of dtype torch.bfloat16" in found.detail
    assert found.error is None


def test_what_is_no_number_fails() -> None:
    """NaN where the reference has a number is a failure, not a small difference."""
    with simulate():
        providers = choose_providers("a3", installed_schemas())
        wrong = planted(providers, "rms_norm", lambda given: {"x": given["x"] * float("nan")})
        (found,) = (one for one in run_checks(wrong, CPU) if one.operator == "rms_norm")
    assert (found.verdict, found.error) == ("fails", None)


def test_checks_that_need_another_kernel_say_so() -> None:
    """Packed attention cannot be checked where nothing packs rows; the reason stands in the report."""
    with simulate(chip="a5", without=["custom::kv_compress_epilog"]):
        providers = choose_providers("a5", installed_schemas())
        found = [one for one in run_checks(providers, CPU) if one.operator == "attend"]
    assert {(one.verdict, one.detail) for one in found} == {("not run", "needs write_window")}


def test_a_wrong_kernel_ends_the_command_with_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 when a check fails, with the whole report printed."""

    def choose(chip: str, installed: Mapping[str, str]) -> Providers | None:
        providers = usable_providers(chip, installed)
        assert providers is not None
        return planted(providers, "activate", WRONG["activate"])

    monkeypatch.setattr("purestep.serving.cli.usable_providers", choose)
    with simulate():
        done = run("--self-test", "--json")
    assert done.exit_code == 1
    found = {one["operator"]: one["verdict"] for one in json.loads(done.stdout)["self_test"]}
    assert found["activate"] == "fails"
    assert found["attend"] == "passes"


def test_asking_for_a_model_on_ascend_kernels_without_them_is_an_error() -> None:
    """Without packages the choice of providers is refused with what to install."""
    with pytest.raises(ps.ConfigError, match="install torch-npu, sgl-kernel-npu and custom_ops"):
        choose_providers("a3", installed_schemas())
