"""``purestep serve`` as a process: starts, answers, says where the memory goes, and stops when told to."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import purestep.serving.cli as cli
import pytest
from kit.http import Server
from typer.testing import CliRunner

ARGUMENTS = ["--port", "0", "--context-length", "256", "--max-running-requests", "2", "--debug-invariants"]


def test_the_command_serves_until_it_is_told_to_stop() -> None:
    """The process shows its memory and address, answers, logs one line of JSON a request, and ends well on SIGTERM."""
    command = [sys.executable, "-m", "purestep", "serve", *ARGUMENTS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        heard = ""
        for line in process.stderr:
            heard += line
            if "serving 'tiny' at http://127.0.0.1:" in line:
                break
        for expected in ("weights", "cache swa", "in all"):
            assert expected in heard
        server = Server(int(heard.rstrip().rpartition(":")[2]), [])
        reply = server.post("/v1/completions", {"model": "tiny", "prompt": "And God", "max_tokens": 3})
        assert reply.json["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read().splitlines()
        assert process.wait(30) == 0
    record = json.loads(next(line for line in rest if line.startswith("{")))
    assert (record["path"], record["status"]) == ("/v1/completions", 200)
    assert any(line.startswith("stopping") for line in rest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", "7"], "multiple of 4"),
        (["--context-length", "999999"], "context"),
        (["--port", "-1"], "--port"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(arguments: list[str], message: str) -> None:
    """Settings that cannot be honoured are one message and exit code 2."""
    result = CliRunner().invoke(cli.app, ["serve", *arguments], prog_name="purestep")
    assert result.exit_code == 2, result.stderr
    assert message in result.stderr


def test_missing_libraries_are_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the server's libraries the command says which is missing and what to install."""

    def refuse(*_: Any) -> None:
        raise ModuleNotFoundError("no module", name="aiohttp")

    monkeypatch.setattr(cli, "import_module", refuse)
    result = CliRunner().invoke(cli.app, ["serve"], prog_name="purestep")
    assert result.exit_code == 2
    assert "purestep[serving]" in result.stderr
    assert "aiohttp" in result.stderr
