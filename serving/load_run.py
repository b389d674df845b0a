"""``purestep bench-serve``: a whole load test, with a server of its own where none is named."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import attrs

from .load_client import LoadError, Target, first_model, run_load
from .load_plan import Prompt
from .load_stats import Outcome

__all__ = ["own_server", "run_bench", "server_arguments"]

_ADDRESS: Final = re.compile(r"^serving .* at (http://\S+)$")
_FRAME_TOKENS: Final = 16
"""More than what a server puts around the words of a prompt."""

_STOP_SECONDS: Final = 10.0
"""For a server of our own to end by itself."""


def run_bench(
    target: Target,
    prompts: Sequence[Prompt],
    warmups: Sequence[Prompt] = (),
    *,
    concurrency: int | None = None,
    arrivals: Sequence[float] | None = None,
    server: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Target, list[Outcome]]:
    """Test a server.

    Args:
        target: who is asked; without a model the server's first.
        prompts: what is sent.
        warmups: sent before, one after the other, and not measured.
        concurrency: clients of a closed loop.
        arrivals: seconds at which the requests of an open loop are sent.
        server: arguments of ``purestep serve`` for a server that lives as long as the test; None asks the target's.
        progress: called as (requests that ended, requests).
    Returns:
        (whom was asked, how every request went).
    Raises:
        LoadError: the server cannot be asked at all, or a warm-up failed.
    """

    async def measure(base_url: str) -> tuple[Target, list[Outcome]]:
        asked = attrs.evolve(target, base_url=base_url)
        if not asked.model:
            asked = attrs.evolve(asked, model=await first_model(base_url, api_key=target.api_key))
        for outcome in await run_load(asked, warmups, concurrency=1):
            if outcome.failure is not None:
                raise LoadError(
                    outcome.failure, f"{base_url}: the first request failed ({outcome.failure}): {outcome.detail}"
                )
        return asked, await run_load(asked, prompts, concurrency=concurrency, arrivals=arrivals, progress=progress)

    async def work() -> tuple[Target, list[Outcome]]:
        if server is None:
            return await measure(target.base_url)
        async with own_server([sys.executable, "-m", "purestep", "serve", "--port", "0", *server]) as base_url:
            return await measure(base_url)

    return asyncio.run(work())


def server_arguments(model: str, *, running: int, waiting: int, tokens: int | None) -> list[str]:
    """Return the arguments of ``purestep serve`` for a server that can take a load.

    Args:
        model: "tiny", or the folder of a checkpoint.
        running: requests at once.
        waiting: requests that may wait.
        tokens: of the longest request; None for the server's default.
    """
    sizes = {"--max-running-requests": running, "--max-queued-requests": waiting}
    if tokens is not None:
        sizes["--context-length"] = tokens + _FRAME_TOKENS
    return ["--model", model, "--no-log-requests", *(str(part) for pair in sizes.items() for part in pair)]


@asynccontextmanager
async def own_server(command: Sequence[str]) -> AsyncIterator[str]:
    """Run a server in a process of its own while a block runs; yields its address.

    Args:
        command: that starts it; it says on standard error where it serves, as ``purestep serve`` does.
    Raises:
        LoadError: it ends before it serves.
    """
    # A group of its own, so that Ctrl-C reaches this process alone, which then stops the server.
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stderr is not None, "the pipe was asked for"
    listener: asyncio.Task[None] | None = None
    try:
        address = await _address(process.stderr)
        listener = asyncio.create_task(_discard(process.stderr))
        yield address
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
        if listener is not None:
            await listener


async def _address(said: asyncio.StreamReader) -> str:
    lines: list[str] = []
    async for raw in said:
        lines.append(raw.decode("utf-8", errors="replace").rstrip())
        if match := _ADDRESS.match(lines[-1]):
            return match[1]
    raise LoadError("server", "the server ended before it served: " + " ".join(lines[-3:]))


async def _discard(said: asyncio.StreamReader) -> None:
    """Read what nobody wants to know, so that its writer never waits."""
    while await said.read(65536):
        pass
