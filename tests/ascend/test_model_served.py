"""``purestep serve`` on simulated Ascend kernels: the command starts, answers over HTTP, and stops when told to."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

import purestep as ps
import pytest
from ascend_sim.simulator import simulate
from kit.http import Server
from purestep.serving.cli import app
from typer.testing import CliRunner

PROMPT = "In the beginning"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def talk(port: int, found: dict[str, Any]) -> None:
    """Ask for one completion once the server is up, then tell the process to stop."""
    server = Server(port, [])
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    try:
        for _ in range(600):
            try:
                found["health"] = server.get("/health").status
                break
            except OSError:
                time.sleep(0.05)
        found["reply"] = server.post("/v1/completions", body)
    finally:
        if "health" in found:  # else there is nothing to stop, and nothing that would take the signal
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("chip", ["a3", "a5"])
def test_a_completion_over_http_is_the_reply_in_process(chip: str) -> None:
    """The command, told the chip, serves from the registered kernels what the same model says in this process."""
    config, port, found = ps.load_model("tiny").config, free_port(), {}
    machine = {"heads": 4, "strict_sizes": False, "rope_width": config.qk_rope_head_dim}
    with simulate(chip=chip, **machine):
        model = ps.load_model("tiny", dtype="bfloat16", kernels="ascend", chip=chip)
        expected = "".join(ps.generate(model, PROMPT, ps.SamplingParams(temperature=0, max_new_tokens=6)))
        client = threading.Thread(target=talk, args=(port, found))
        client.start()
        options = [
            "--dtype",
            "bfloat16",
            "--context-length",
            "256",
            "--max-running-requests",
            "2",
            "--debug-invariants",
        ]
        done = CliRunner().invoke(app, ["serve", "--kernels", "ascend", "--chip", chip, "--port", str(port), *options])
        client.join(30)
    assert done.exit_code == 0, done.output
    assert f"serving 'tiny' at http://127.0.0.1:{port}" in done.stderr
    assert found["health"] == 200
    assert found["reply"].json["choices"][0]["text"] == expected
    assert found["reply"].json["usage"]["completion_tokens"] == 6
