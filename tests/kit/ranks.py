"""Several ranks on this machine: processes that wait for functions to run, started once for a test file.

Every rank calls the same function with its own arguments; results come back in order of rank. A rank that takes too
long, or dies, ends all of them, so that no test hangs.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import distributed

__all__ = ["Failure", "RankPool", "rank_pool"]

LIMIT_S = 60.0
"""Longest that one call may take."""


class Failure(Exception):
    """What a rank raised: its class, and its words with the way there."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(f"{kind}: {words}")
        self.kind = kind
        self.words = words

    def __reduce__(self) -> tuple[type[Failure], tuple[str, str]]:
        return Failure, (self.kind, self.words)


def _serve(rank: int, size: int, file: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S)
    )
    pipe.send(os.getpid())
    while (task := pipe.recv()) is not None:
        function, args = task
        try:
            pipe.send((True, function(*args)))
        except Exception as error:
            pipe.send((False, Failure(type(error).__name__, traceback.format_exc())))
    distributed.destroy_process_group()


class RankPool:
    """Ranks that are running."""

    def __init__(self, size: int, folder: str) -> None:
        context = get_context("spawn")
        file = os.path.join(folder, "store")
        pairs = [context.Pipe() for _ in range(size)]
        self.size = size
        self._pipes = [mine for mine, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(rank, size, file, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        self._gather(LIMIT_S)

    def attempt(self, function: Callable[..., Any], *args: Sequence[Any], limit_s: float = LIMIT_S) -> list[Any]:
        """Run a function on every rank.

        Args:
            function: one that a fresh process can import.
            args: for each argument, its value on every rank.
            limit_s: longest that it may take.
        Returns:
            What each rank returned, or the ``Failure`` that it raised.
        """
        for rank, pipe in enumerate(self._pipes):
            pipe.send((function, tuple(arg[rank] for arg in args)))
        return [value for _, value in self._gather(limit_s)]

    def run(self, function: Callable[..., Any], *args: Sequence[Any], limit_s: float = LIMIT_S) -> list[Any]:
        """Run a function on every rank; raise the first ``Failure``."""
        found = self.attempt(function, *args, limit_s=limit_s)
        for value in found:
            if isinstance(value, Failure):
                raise value
        return found

    def same(self, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """Run a function with the same arguments on every rank; raise the first ``Failure``."""
        return self.run(function, *([arg] * self.size for arg in args), limit_s=limit_s)

    def kill(self, rank: int) -> None:
        """End one rank at once."""
        self._processes[rank].kill()
        self._processes[rank].join()

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
            process.join()

    def _gather(self, limit_s: float) -> list[Any]:
        found: dict[int, Any] = {}
        missing = dict(enumerate(self._pipes))
        while missing:
            ready = wait(list(missing.values()), limit_s)
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(missing)} did not answer within {limit_s} seconds")
            for rank in [rank for rank, pipe in missing.items() if pipe in ready]:
                try:
                    found[rank] = missing.pop(rank).recv()
                except (EOFError, ConnectionResetError):
                    found[rank] = (False, Failure("Lost", f"rank {rank} has ended"))
        return [found[rank] for rank in range(self.size)]


@contextmanager
def rank_pool(size: int) -> Iterator[RankPool]:
    """Start ranks, and end them afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        pool = RankPool(size, folder)
        try:
            yield pool
        finally:
            pool.close()
