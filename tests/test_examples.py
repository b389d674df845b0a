"""Everything that a reader is told to run, runs: the examples, and the snippets of the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
QUICK = {"05_train.py": ["--steps", "5"]}
"""Arguments for what would take minutes."""


def run(script: Path, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder of its own."""
    command = [sys.executable, str(script), *args]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("script", EXAMPLES, ids=[script.name for script in EXAMPLES])
def test_example_runs_and_ends_with_a_fact(script: Path, tmp_path: Path) -> None:
    """An example runs without arguments from anywhere, complains about nothing, and its last line says something."""
    result = run(script, tmp_path, *QUICK.get(script.name, []))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1].strip()


def test_readme_snippets_run(tmp_path: Path) -> None:
    """The Python snippets of the README run, one after the other, as a reader would type them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    script = tmp_path / "snippets.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)), encoding="utf-8")
    result = run(script, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
