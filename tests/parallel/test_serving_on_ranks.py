"""Serving over ranks: replies are those of one process, replicas share the work, and a lost rank is an error."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import purestep as ps
import pytest
from kit.http import Server
from kit.rank_serving import Asked, ask_engine, lose_a_rank, pass_values
from kit.ranks import RankPool, rank_pool
from kit.serving import greedy
from kit.steps import ids_of
from purestep.serving.processes import join_processes

ONE, TP2, DP2 = ps.Parallel(), ps.Parallel(tp=2, timeout_s=20), ps.Parallel(dp=2, timeout_s=20)
EP2 = ps.Parallel(dp=2, ep=2, moe="ep", timeout_s=20)


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with rank_pool(2) as running:
        yield running


def asked(n: int, seed: int, n_new: int = 6, only: int | str | None = None) -> Asked:
    params = ps.SamplingParams(temperature=1.0, seed=seed, ignore_eos=True, max_new_tokens=n_new)
    return ids_of(n, 33, seed=seed % 2), params, only


ROUNDS = [[asked(5, 1), asked(140, 2), asked(9, 3, only=17), asked(200, 4), asked(1, 5)], [asked(150, 6), asked(3, 7)]]


@pytest.mark.parametrize("parallel", [TP2, DP2, EP2], ids=["tp", "dp", "ep"])
def test_replies_are_those_of_one_process(two: RankPool, parallel: ps.Parallel) -> None:
    """Sampled, constrained and long requests get the same tokens over ranks as in one process, and nothing is left."""
    alone = ask_engine(ONE, ROUNDS)
    found, nothing = two.same(ask_engine, parallel, ROUNDS)
    assert nothing is None
    assert [reply[:3] for reply in found.replies] == [reply[:3] for reply in alone.replies]
    assert found.replies[2][0] == (17,) * 6
    assert (found.status.running, found.status.waiting) == (0, 0)
    assert found.status.is_ready
    rows, total = found.status.pools["rows"]
    assert rows <= 2 * parallel.dp
    assert total == 4 * parallel.dp


def test_replicas_share_the_requests(two: RankPool) -> None:
    """With two requests at once each replica runs one: steps count for both."""
    found, _ = two.same(ask_engine, DP2, [[asked(4, 1, 5), asked(4, 2, 5)]])
    assert found.status.counters["steps"] == 10
    found, _ = two.same(ask_engine, TP2, [[asked(4, 1, 5), asked(4, 2, 5)]])
    assert found.status.counters["steps"] == 5


def test_a_broken_constraint_ends_its_own_request_alone(two: RankPool) -> None:
    """A request whose constraint fails ends with that error; the one beside it, and on the other replica, goes on."""
    for parallel in (TP2, DP2):
        found, _ = two.same(ask_engine, parallel, [[asked(4, 1), asked(5, 2, only="fails"), asked(6, 3)]])
        assert [reply[1] for reply in found.replies] == ["length", "error", "length"]
        assert "no grammar after 0 tokens" in str(found.replies[1][2])


def test_a_cancelled_request_ends_on_its_replica(two: RankPool) -> None:
    """A request that is not wanted any more ends, whichever replica has it, and the others do not."""
    found, _ = two.same(ask_engine, DP2, [[asked(4, 1, 200), asked(5, 2), asked(6, 3)]], True)
    assert [reply[1] for reply in found.replies] == ["abort", "length", "length"]
    assert found.status.counters["aborts"] == 1


@pytest.mark.parametrize("while_idle", [False, True], ids=["asked", "idle"])
def test_a_lost_rank_fails_requests_and_health(while_idle: bool) -> None:
    """When a rank dies its requests end with an error that says so, and the engine is not ready, asked or idle."""
    parallel = ps.Parallel(tp=2, timeout_s=6)
    with rank_pool(2) as running:
        found = running.attempt(lose_a_rank, [parallel] * 2, [ids_of(4, 33)] * 2, [while_idle] * 2)
    error, is_ready, failure = found[0]
    assert not is_ready
    assert "rank" in failure
    assert while_idle or "rank 0 of 2" in error


def test_values_travel_whole(two: RankPool) -> None:
    """Rank 0's value arrives everywhere, and everybody's value in order of rank, whatever its size."""
    for value in ({"a": (1, 2.5, None)}, "x" * 100_000, [greedy(3)]):
        found = two.same(pass_values, TP2, value)
        assert [repr(one) for one, _ in found] == [repr(value)] * 2
        assert all([rank for rank, _ in heard] == [0, 1] for _, heard in found)


def test_the_command_needs_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout of other than the processes that were started is refused, with the command that starts them."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    join_processes(ONE)
    with pytest.raises(ps.ConfigError, match="--nproc-per-node 4 -m purestep serve --tp 2 --dp 2"):
        join_processes(ps.Parallel(tp=2, dp=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ps.ConfigError, match="got 2"):
        join_processes(ONE)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_the_command_serves_over_processes_and_ends_with_them() -> None:
    """``purestep serve --tp 2`` in two processes answers like one, and both end well when rank 0 is told to stop."""
    body = {"model": "tiny", "prompt": "In the beginning", "max_tokens": 8, "temperature": 0}
    command = [sys.executable, "-m", "purestep", "serve", "--tp", "2", "--port", "0", "--context-length", "256"]
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [*command, "--debug-invariants"],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | torchrun | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].stderr is not None
        line = next(line for line in ranks[0].stderr if "serving 'tiny' at http://127.0.0.1:" in line)
        server = Server(int(line.rstrip().rpartition(":")[2]), [])
        reply = server.post("/v1/completions", body).json
        model = ps.load_model("tiny")
        expected = "".join(ps.generate(model, body["prompt"], ps.SamplingParams(temperature=0, max_new_tokens=8)))
        assert reply["choices"][0]["text"] == expected
        assert server.get("/ready").status == 200
        ranks[0].send_signal(signal.SIGTERM)
        rest = ranks[0].stderr.read()
        assert [rank.wait(30) for rank in ranks] == [0, 0]
        assert json.loads(next(line for line in rest.splitlines() if line.startswith("{")))["status"] == 200
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            assert rank.stderr is not None
            rank.stderr.close()
