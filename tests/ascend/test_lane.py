"""The lane that meets the genuine torch-npu: when it does not run, what it counts as wrong, its stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_lane.calls import CALLS, described
from ascend_lane.text import differences
from ascend_sim.simulator import simulate
from purestep.ops.ascend.schemas import load_schemas

SCRIPT = Path(__file__).parents[1] / "ascend_lane" / "run"
TOOLS = pytest.mark.skipif(not all(map(shutil.which, ("gcc", "nm", "ldd"))), reason="needs gcc and binutils")


def lane() -> Any:
    """Load the script as a module."""
    spec = spec_from_loader("ascend_lane_run", SourceFileLoader("ascend_lane_run", str(SCRIPT)))
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["ascend_lane_run"] = module
    write, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    finally:
        sys.dont_write_bytecode = write
    return module


def run(**environment: str) -> tuple[int, str]:
    """Run the script with a changed environment: (exit code, what it prints)."""
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_without_a_compiler_it_says_so() -> None:
    """Missing tools are a reason not to run, and no failure."""
    code, text = run(PATH="/nowhere")
    assert code == 0
    assert text == "torch-npu 2.13.0: not run: this machine has no gcc, nm, ldd\n"


@TOOLS
def test_without_wheels_it_says_so() -> None:
    """An index that nobody answers at is a reason not to run, and no failure."""
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
    code, text = run(**nowhere, PIP_RETRIES="0", PIP_CONFIG_FILE=os.devnull, PIP_NO_CACHE_DIR="1")
    assert code == 0
    assert text.startswith("torch-npu 2.13.0: not run: ")
    assert "torch-npu==2.13.0" in text


def test_the_script_can_be_run_as_it_is() -> None:
    """It is executable and says by which interpreter."""
    assert os.access(SCRIPT, os.X_OK)
    assert SCRIPT.read_text().startswith("#!/usr/bin/env python3\n")


@TOOLS
@pytest.mark.parametrize(("outcome", "code"), [("same", 0), ("differs", 1), ("not run", 0), ("failed", 1)])
def test_only_differences_and_failures_count(
    outcome: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1 for what differs or goes wrong, 0 for agreement and what cannot be had; the folder goes."""
    module = lane()
    folders, done = [], []

    def meet(release: str, folder: Path) -> list[str]:
        folders.append(folder)
        (folder / "link").mkdir()
        (folder / "genuine.json").touch()
        if outcome in ("not run", "failed"):
            raise {"not run": module.NotRun, "failed": module.Failed}[outcome]("a reason")
        return ["npu::x: recorded a, live b"] if outcome == "differs" else []

    def read(release: str, folder: Path, home: Path) -> list[str]:
        assert home == folders[0]
        done.append(release)
        return []

    monkeypatch.setattr(module, "meet", meet)
    monkeypatch.setattr(module, "read", read)
    assert module.main(["2.13.0"]) == code
    assert done == ["2.10.0", "2.10.0.post4", "2.14.0"]
    assert not any(folder.exists() for folder in folders)
    shown = capsys.readouterr().out
    assert ("a reason" in shown) is (outcome in ("not run", "failed"))
    assert ("live b" in shown) is (outcome == "differs")


@pytest.mark.parametrize("release", ["2.10.0", "2.13.0"])
def test_schemas_are_read_out_of_a_binary(release: str) -> None:
    """Texts between zeros are compared with the records; a changed one and a lost one are named."""
    records = [r.text for r in load_schemas() if r.provider == "torch-npu" and release in r.releases]
    plain = [text.removeprefix("npu::") for text in records]
    noise = b"\x00npu_rms_norm\x00(Tensor) -> x\x00"
    assert differences(release, noise + b"\x00".join(text.encode() for text in plain) + noise) == (len(records), [])
    assert differences(release, noise + b"\x00".join(text.encode() for text in records) + noise)[1] == []
    changed = [text.replace("Tensor? p=None, Tensor? k=None", "Tensor? k=None, Tensor? p=None") for text in plain]
    lost = [text for text in changed if not text.startswith("npu_rms_norm(")]
    _, found = differences(release, noise + b"\x00".join(text.encode() for text in lost) + noise)
    assert sorted(one.split(":")[2] for one in found) == ["npu_rms_norm", "npu_top_k_top_p"]
    assert "npu::npu_rms_norm: recorded, not in the binary" in found


@TOOLS
def test_stand_ins_make_a_library_loadable(tmp_path: Path) -> None:
    """A library whose libraries are gone loads again, and what it calls there returns 0."""
    package, stubs = tmp_path / "package", tmp_path / "stubs"
    package.mkdir()
    stubs.mkdir()
    for name, body in (
        ("gone", "int lost(void) { return 7; }"),
        ("also", "int unused(void) { return 8; }"),
        ("here", "int lost(void); int ask(void) { return lost() + 1; }"),
    ):
        (tmp_path / f"{name}.c").write_text(body)
        needs = [f"-L{tmp_path}", "-Wl,--no-as-needed", "-lgone", "-lalso"] if name == "here" else []
        target = (package if name == "here" else tmp_path) / f"lib{name}.so"
        soname = f"-Wl,-soname,lib{name}.so"
        subprocess.run(["gcc", "-shared", "-fPIC", soname, "-o", target, tmp_path / f"{name}.c", *needs], check=True)
    for name in ("gone", "also"):
        (tmp_path / f"lib{name}.so").unlink()
    assert lane().stand_ins(package, tmp_path, stubs) == 1
    assert sorted(path.name for path in stubs.glob("*.so")) == ["libalso.so", "libgone.so"]
    code = f"import ctypes; print(ctypes.CDLL({str(package / 'libhere.so')!r}).ask())"
    env = {**os.environ, "LD_LIBRARY_PATH": str(stubs)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize("chip", ["a3", "a5"])
def test_every_compared_call_has_simulated_shapes(chip: str) -> None:
    """The simulator answers each of the calls that the genuine package is asked, without content."""
    with simulate(chip=chip):
        for name, (where, call) in CALLS.items():
            if where == chip:
                result = call()
                assert described(result), name
                tensors = result if isinstance(result, (list, tuple)) else [result]
                assert all(x.device == torch.device("meta") for x in tensors)
