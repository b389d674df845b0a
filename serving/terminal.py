"""The standard streams: text comes in and goes out as plain bytes, bars and tables only where somebody looks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..state.errors import RequestError

__all__ = ["INTERRUPTED", "STDIN", "decode_text", "progress_bar", "read_text", "table_console", "write_text"]

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C."""

STDIN: Final = "-"
"""The name of standard input where a file or a text is expected."""


def read_text(name: str) -> str:
    """Read a text, every byte of it.

    Args:
        name: of a file, or ``STDIN``.
    Raises:
        RequestError: it cannot be read, is empty, or is not UTF-8.
    """
    if name != STDIN:
        try:
            return decode_text(name, Path(name).read_bytes())
        except OSError as error:
            raise RequestError(f"{name}: expected a file to read, got: {error.strerror}", field=name) from error
    if sys.stdin.isatty():
        typer.echo("reading the text from the terminal; end it with Ctrl-D on a line of its own", err=True)
    return decode_text("standard input", sys.stdin.buffer.read())


def decode_text(name: str, raw: bytes) -> str:
    """Decode a text from UTF-8.

    Args:
        name: of where it comes from, for the complaint.
        raw: its bytes.
    Raises:
        RequestError: it is empty or not UTF-8.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name}: expected text in UTF-8, got byte 0x{raw[error.start]:02x} at {error.start}; convert it first",
            field=name,
        ) from error
    if not text:
        raise RequestError(f"{name}: expected some text, got none", field=name)
    return text


def write_text(text: str) -> None:
    """Write to standard output at once, as UTF-8 whatever the locale, and nothing else."""
    typer.echo(text.encode(), nl=False)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[..., None]]:
    """Show a bar while a block runs, if standard error is a terminal; yields a function of (done, of how many)."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    is_hidden = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=is_hidden) as bars:
        task = bars.add_task(label, total=None)
        yield lambda done, total, *_: bars.update(task, completed=done, total=total)


def table_console() -> Console:
    """Open standard output for tables: as wide as the terminal, or wide enough for any table in a pipe."""
    return Console(width=None if sys.stdout.isatty() else 120)
