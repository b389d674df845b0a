"""``purestep serve`` as a process: starts, answers, says where the memory goes, and stops when told to."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any

import purestep.serving.cli as cli
import pytest
from kit.http import Server
from typer.testing import CliRunner

ARGUMENTS = ["--context-length", "256", "--max-running-requests", "2", "--debug-invariants"]


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Server, str]]:
    """Start the command and wait until it listens: (process, server, what it said)."""
    command = [sys.executable, "-m", "purestep", "serve", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            heard = ""
            for line in process.stderr:
                heard += line
                if "serving 'tiny' at http://127.0.0.1:" in line:
                    break
            yield process, Server(int(heard.rstrip().rpartition(":")[2]), []), heard
        finally:
            process.kill()


def test_the_command_serves_until_it_is_told_to_stop() -> None:
    """The process shows its memory and address, answers, logs one line of JSON a request, and ends well on SIGTERM."""
    with started("--port", "0", *ARGUMENTS) as (process, server, heard):
        for expected in ("weights", "cache swa", "scratch of a step", "in all", "reused from 128 tokens on"):
            assert expected in heard
        reply = server.post("/v1/completions", {"model": "tiny", "prompt": "And God", "max_tokens": 3})
        assert reply.json["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        rest = process.stderr.read().splitlines()
        assert process.wait(30) == 0
    record = json.loads(next(line for line in rest if line.startswith("{")))
    assert (record["path"], record["status"]) == ("/v1/completions", 200)
    assert any(line.startswith("stopping") for line in rest)


def test_a_killed_server_loses_its_running_requests_alone() -> None:
    """After SIGKILL in the middle of a reply the same command on the same port starts and answers as before."""
    body = {"model": "tiny", "prompt": "In the beginning", "max_tokens": 8, "temperature": 0}
    long = json.dumps(body | {"max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
    with started("--port", "0", *ARGUMENTS) as (process, server, _):
        before = server.post("/v1/completions", body).json["choices"]
        with closing(HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
            connection.request("POST", "/v1/completions", long, {"Content-Type": "application/json"})
            assert connection.getresponse().readline().startswith(b"data: ")
            process.kill()
            process.wait(30)
    with started("--port", str(server.port), *ARGUMENTS) as (_, again, _):
        after = again.post("/v1/completions", body).json["choices"]
        assert [one["text"] for one in after] == [one["text"] for one in before]
        assert again.get("/health").status == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", "7"], "multiple of 4"),
        (["--context-length", "999999"], "context"),
        (["--port", "-1"], "--port"),
        (["--chunked-prefill-size", "135"], "at least 136 tokens a step"),
        (["--max-running-requests", "400"], "--chunked-prefill-size"),
        (["--max-total-tokens", "1"], "tokens: expected at least 2"),
        (["--api-key", ""], "api_key: expected some text"),
        (["--served-model-name", ""], "served_model_name: expected some text"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(arguments: list[str], message: str) -> None:
    """Settings that cannot be honoured are one message and exit code 2."""
    result = CliRunner().invoke(cli.app, ["serve", "--port", "0", *arguments], prog_name="purestep")
    assert result.exit_code == 2, result.stderr
    assert message in result.stderr


def test_an_address_that_is_taken_is_said_before_anything_is_loaded() -> None:
    """A port that another process listens on, and an address of no machine, are one message and exit code 2."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, words in (
            (["--port", str(port)], ("port: expected a free port", f"127.0.0.1:{port}", "another --port")),
            (["--host", "192.0.2.1"], ("host: expected an address of this machine", "192.0.2.1", "another --host")),
        ):
            result = CliRunner().invoke(cli.app, ["serve", *arguments, "--dtype", "never"], prog_name="purestep")
            assert result.exit_code == 2, result.stderr
            assert all(word in result.stderr for word in words), result.stderr
            assert result.stderr.count("\n") == 1


def test_an_address_that_is_taken_meanwhile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that another process took while the model was loaded is the same message."""
    monkeypatch.setattr(cli, "check_address", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = ["--port", str(taken.getsockname()[1]), *ARGUMENTS]
        result = CliRunner().invoke(cli.app, ["serve", *arguments], prog_name="purestep")
    assert result.exit_code == 2, result.stderr
    assert "port: expected a free port" in result.stderr


def test_missing_libraries_are_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the server's libraries the command says which is missing and what to install."""

    def refuse(*_: Any) -> None:
        raise ModuleNotFoundError("no module", name="aiohttp")

    monkeypatch.setattr(cli, "import_module", refuse)
    result = CliRunner().invoke(cli.app, ["serve"], prog_name="purestep")
    assert result.exit_code == 2
    assert 'pip install ".[serving]"' in result.stderr
    assert "aiohttp" in result.stderr
