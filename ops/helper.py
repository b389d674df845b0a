"""A process that compiles what it is sent: the compiler uses one core and is not safe in several threads.

Messages are bytes over a connection: a trace and a path go out; seconds, or the beginning of an error, come back.

Source: none.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Final

__all__ = ["MOST_HELPERS", "Helper"]

MOST_HELPERS: Final = 7
"""Each takes half a gigabyte."""

_START: Final = "import sys; sys.path[:] = {path!r}; from {package}.compiling import serve; serve({number})"


class Helper:
    """Start a helper, and end it."""

    def __init__(self) -> None:
        """Start it; it takes seconds until it compiles, and costs this process nothing."""
        self._own, other = Pipe()
        code = _START.format(path=sys.path, package=__package__, number=other.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        other.close()

    def __enter__(self) -> Helper:
        """Use it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        """End it, whatever it does."""
        self._own.close()
        self._process.kill()
        self._process.wait()

    def compile(self, trace: Any, path: Path) -> float:
        """Compile a trace into a file: the seconds that it took.

        Raises:
            EOFError, OSError: the helper is gone.
            ValueError: it could not compile this one.
        """
        self._own.send_bytes(import_module(".compiling", __package__).message(trace, path))
        reply = pickle.loads(self._own.recv_bytes())
        if isinstance(reply, str):
            raise ValueError(reply)
        seconds: float = reply
        return seconds
