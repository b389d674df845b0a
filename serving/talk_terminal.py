"""``purestep chat``: reads what the user says and the commands of the chat, and shows the replies as they come.

Standard output carries the replies; in a pipe every one of them ends with a line end, and thinking goes to standard
error like all that is not a reply.

Ctrl-C stops the reply that runs. At the prompt it drops the line; pressed twice at an empty one it ends the chat. In a
pipe it ends the chat.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

import attrs
import typer
from rich.console import Console

from ..model.model import Model
from ..state.errors import PurestepError, RequestError
from ..state.sampling import SamplingParams
from .engine import EngineLimits
from .info import pairs_table
from .talk import Talk, load_talk, save_talk
from .talk_reply import Partner, Reply
from .terminal import INTERRUPTED, decode_text, write_text

__all__ = ["run_chat"]

_PROMPT: Final = "> "
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What would move the cursor or worse; a model may say it, a terminal must not obey it."""


def run_chat(model: Model, limits: EngineLimits, params: SamplingParams, *, system: str, thinking: bool) -> bool:
    """Chat until the input ends.

    Args:
        model: that replies.
        limits: of the engine.
        params: how to sample; with a seed.
        system: what the model is told first; empty for nothing.
        thinking: whether it thinks before it replies.
    Returns:
        Whether everything that was asked for was done.
    Raises:
        ConfigError: the model cannot chat.
    """
    partner = Partner(model, limits, params, thinking=thinking)
    with _Interrupts() as interrupts, asyncio.Runner() as runner:
        runner.run(partner.start())
        try:
            return _Chat(runner, partner, Talk(system=system), interrupts).run()
        finally:
            # Whoever asks again while the last step ends means at once.
            interrupts.obey = _leave
            runner.run(partner.stop())


class _Interrupts:
    """What Ctrl-C does, for as long as the chat goes on."""

    def __init__(self) -> None:
        self.obey: Callable[[], None] = self.drop
        self.dropped = ""

    def __enter__(self) -> _Interrupts:
        self._before = signal.signal(signal.SIGINT, lambda *_: self.obey())
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def drop(self) -> NoReturn:
        """Leave whatever is going on, and note the line that was being written."""
        self.dropped = _written()
        raise KeyboardInterrupt

    async def stopping(self, reply: Coroutine[Any, Any, Reply]) -> Reply:
        """Wait for a reply, which Ctrl-C cuts short, however often it is pressed."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"

        def stop() -> None:
            if not task.cancelling():
                task.cancel()

        def obey() -> None:
            loop.call_soon_threadsafe(stop)

        self.obey = obey
        try:
            return await reply
        finally:
            self.obey = self.drop


def _leave() -> NoReturn:
    os._exit(INTERRUPTED)


def _written() -> str:
    """Return what stands in the line that is being edited, where the platform edits lines."""
    readline = sys.modules.get("readline")
    return "" if readline is None else readline.get_line_buffer()


class _Chat:
    """A chat while it goes on.

    Args:
        runner: of the event loop.
        partner: that replies.
        talk: what it begins with.
        interrupts: what Ctrl-C does.
    """

    def __init__(self, runner: asyncio.Runner, partner: Partner, talk: Talk, interrupts: _Interrupts) -> None:
        self._runner = runner
        self._interrupts = interrupts
        self._partner = partner
        self._talk = talk
        self._last: Reply | None = None
        self._is_terminal = sys.stdin.isatty()

    def run(self) -> bool:
        """Take turns until the input ends; tell whether all went well."""
        if self._is_terminal:
            # Only loading it is needed: from then on it edits the lines that are read, where the platform has it.
            with suppress(ImportError):
                import_module("readline")
            _note("chat; /help shows the commands, Ctrl-C stops a reply, Ctrl-D ends")
        went_well, is_asked = True, False
        while True:
            try:
                line = self._read()
                is_asked = False
                if line is None or not self._obey(line):
                    return went_well
            except KeyboardInterrupt:
                is_empty = not self._interrupts.dropped
                if not self._is_terminal or (is_asked and is_empty):
                    raise
                typer.echo(err=True)
                is_asked = is_empty
                if is_asked:
                    _note("Ctrl-C again, or Ctrl-D, ends the chat")
            except BrokenPipeError:
                raise
            except (PurestepError, OSError) as error:
                went_well = self._is_terminal
                _note(str(error))

    def _read(self) -> str | None:
        """Read a line; None at the end of the input."""
        if not self._is_terminal:
            raw = sys.stdin.buffer.readline()
            if not raw:
                return None
        else:
            try:
                raw = os.fsencode(_ask()) + b"\n"
            except EOFError:
                typer.echo(err=True)
                return None
            except UnicodeError as error:
                raise RequestError("what you say: expected text in UTF-8, got other bytes", field="line") from error
        return decode_text("what you say", raw).rstrip("\r\n")

    def _obey(self, line: str) -> bool:
        """Do what a line asks for; tell whether the chat goes on."""
        if not line.strip():
            return True
        if not line.startswith("/") or line.startswith("//"):
            self._say(self._talk, line[1:] if line.startswith("//") else line)
            return True
        name, _, rest = line[1:].partition(" ")
        if name == "quit":
            return False
        if name not in _COMMANDS:
            raise RequestError(
                f"/{name}: expected one of {', '.join('/' + one for one in (*_COMMANDS, 'quit'))}; "
                "to say a line that begins with a slash, begin it with two",
                field="command",
                got=name,
            )
        _COMMANDS[name].run(self, rest.strip())
        return True

    def _say(self, talk: Talk, user: str) -> None:
        """Say something after what a talk holds, show the reply, and go on from there."""
        screen = _Screen()
        try:
            reply = self._runner.run(self._interrupts.stopping(self._partner.reply(talk, user, screen.show)))
        except PurestepError:
            screen.finish()
            raise
        is_interrupted = reply.reason == "interrupted"
        screen.finish(has_replied=not is_interrupted)
        if reply.first_s is None and is_interrupted:
            _note("stopped before the reply began; the chat is as it was")
        else:
            self._last = reply
            self._talk = attrs.evolve(talk, turns=(*talk.turns, reply.turn))
        if reply.reason == "length":
            _note(f"cut after {reply.tally.n_reply:,} tokens, the most that were allowed or that fit")
        if is_interrupted and not self._is_terminal:
            raise KeyboardInterrupt

    def help(self, _: str) -> None:
        """Show the commands."""
        rows = [(f"/{name} {one.argument}".rstrip(), one.about) for name, one in _COMMANDS.items()]
        _show(
            "Commands", [*rows, ("/quit", "End the chat, as Ctrl-D does."), ("//...", "Say a line that begins with /.")]
        )

    def reset(self, _: str) -> None:
        """Forget all turns."""
        self._talk, self._last = attrs.evolve(self._talk, turns=()), None
        _note("forgot all turns" + (", kept the system message" if self._talk.system else ""))

    def undo(self, _: str) -> None:
        """Forget the last turn."""
        self._talk = self._without_last("undo")
        self._last = None
        _note(f"forgot the last turn; turns left: {len(self._talk.turns):,}")

    def retry(self, _: str) -> None:
        """Ask for another reply to the last turn."""
        before = self._without_last("retry")
        self._say(before, self._talk.turns[-1].user)

    def system(self, text: str) -> None:
        """Set what the model is told first."""
        self._talk = attrs.evolve(self._talk, system=text)
        _note("set the system message" if text else "there is no system message any more")

    def save(self, name: str) -> None:
        """Write the chat to a file."""
        save_talk(self._talk, _file("save", name))
        _note(f"wrote {name}; turns: {len(self._talk.turns):,}")

    def load(self, name: str) -> None:
        """Go on with the chat of a file."""
        self._talk, self._last = load_talk(_file("load", name)), None
        _note(f"read {name}; turns: {len(self._talk.turns):,}")

    def stats(self, _: str) -> None:
        """Show the counts of the last reply."""
        if self._last is None:
            raise RequestError("/stats: expected a reply to tell of, got none; say something first", field="stats")
        _show("Last reply", _stats(self._last))

    def _without_last(self, command: str) -> Talk:
        if not self._talk.turns:
            raise RequestError(f"/{command}: expected a turn, got none; say something first", field=command)
        return attrs.evolve(self._talk, turns=self._talk.turns[:-1])


@attrs.frozen
class _Command:
    run: Callable[[_Chat, str], None]
    about: str
    argument: str = ""


_COMMANDS: Final = {
    "help": _Command(_Chat.help, "Show the commands."),
    "reset": _Command(_Chat.reset, "Forget all turns; the system message stays."),
    "undo": _Command(_Chat.undo, "Forget the last turn."),
    "retry": _Command(_Chat.retry, "Get another reply to the last turn."),
    "system": _Command(_Chat.system, "Set the system message; without a text there is none any more.", "TEXT"),
    "save": _Command(_Chat.save, "Write the messages to a file, as JSON.", "FILE"),
    "load": _Command(_Chat.load, "Go on with the messages of a file.", "FILE"),
    "stats": _Command(_Chat.stats, "Show tokens, speed and seed of the last reply."),
}


class _Screen:
    """Shows one reply: thinking dimmed and apart where standard output is a terminal, else on standard error."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._was_thinking: bool | None = None

    def show(self, text: str, is_thinking: bool) -> None:
        """Show a piece."""
        if self._was_thinking and not is_thinking:
            # In a pipe thinking has a stream of its own, whose line ends here.
            typer.echo("\n" if self._is_terminal else "", err=not self._is_terminal)
        self._was_thinking = is_thinking
        if not self._is_terminal:
            typer.echo(text.encode(), nl=False, err=is_thinking)
            return
        text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
        write_text(typer.style(text, dim=True) if is_thinking else text)

    def finish(self, *, has_replied: bool = False) -> None:
        """End the line of the reply.

        Args:
            has_replied: whether there is one even if it says nothing.
        """
        if not self._is_terminal and self._was_thinking:
            typer.echo(err=True)
        if has_replied or self._was_thinking is not None:
            write_text("\n")


def _ask() -> str:
    """Read a line at the terminal; the prompt goes where the user looks and never into a file."""
    if sys.stdout.isatty():
        return input(_PROMPT)
    typer.echo(_PROMPT, nl=False, err=True)
    return input()


def _stats(reply: Reply) -> list[tuple[str, str]]:
    tally = reply.tally
    speed = "-"
    if reply.first_s is not None and tally.n_reply > 1 and reply.whole_s > reply.first_s:
        speed = f"{(tally.n_reply - 1) / (reply.whole_s - reply.first_s):,.1f}"
    return [
        ("prompt tokens", f"{tally.n_prompt:,}"),
        ("of these cached", f"{tally.n_cached:,}" if tally.reasons else "-"),
        ("reply tokens", f"{tally.n_reply:,}"),
        ("of these thinking", "-" if tally.n_reasoning is None else f"{tally.n_reasoning:,}"),
        ("seconds to first token", "-" if reply.first_s is None else f"{reply.first_s:.3f}"),
        ("tokens/s after it", speed),
        ("finish reason", reply.reason),
        ("seed", str(reply.seed)),
    ]


def _show(title: str, rows: list[tuple[str, str]]) -> None:
    Console(stderr=True).print(pairs_table(title, rows))


def _file(command: str, name: str) -> Path:
    if not name:
        raise RequestError(f"/{command}: expected the name of a file, got none", field=command)
    return Path(name).expanduser()


def _note(text: str) -> None:
    """Say something that is no part of the chat."""
    typer.echo(text, err=True)
