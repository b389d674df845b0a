"""``purestep chat``: what is said and shown in a pipe and at a terminal, and that mistakes do not end it."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import purestep as ps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.http import running
from kit.stand_in import StandIn, say
from kit.steps import examples
from purestep.serving import talk_reply
from purestep.serving.cli import app
from purestep.serving.engine import Engine, EngineLimits
from purestep.serving.talk import Talk, Turn, load_talk, save_talk
from purestep.serving.talk_terminal import _Screen
from typer.testing import CliRunner, Result

TINY = Path(ps.__file__).parent / "model" / "tiny"
MODEL = ps.load_model("tiny")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
TURNS = st.builds(Turn, user=TEXT, content=TEXT | st.just(""), reasoning=TEXT | st.just(""))


def chat(*lines: str | bytes, options: str = "--max-tokens 6") -> Result:
    """Chat through a pipe in this process."""
    told = b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)
    return CliRunner().invoke(app, ["chat", *options.split()], input=told, prog_name="purestep")


def ids_of(text: str) -> list[int]:
    """Encode what a model would say, its control tokens included."""
    return MODEL.tokenizer.encode(text, add_special_tokens=False).ids


@attrs.define
class Script:
    """Replies in the order in which they are asked for, and what was asked."""

    engine: StandIn
    replies: list[str]

    def __call__(self, ask: Any) -> Iterator[Any]:
        return say(ids_of(self.replies.pop(0)))(ask)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Let the model say what a test wants."""
    found = Script(StandIn(say([])), [])
    found.engine.source = found
    monkeypatch.setattr(talk_reply, "Engine", lambda *_: found.engine)
    return found


def prompts(script: Script) -> list[str]:
    """Decode what the model was asked, control tokens included."""
    return [MODEL.tokenizer.decode(ask.prompt_ids, skip_special_tokens=False) for ask in script.engine.asks]


def saved(path: Path) -> list[tuple[str, str]]:
    """Read a file of messages."""
    return [(one["role"], one["content"]) for one in json.loads(path.read_text())]


def test_a_pipe_gets_the_replies_of_the_server() -> None:
    """Every line is a turn, and standard output has what the server replies to the same messages, a line end each."""
    lines, messages, expected = ["Who is the king?", "And his son?"], [{"role": "system", "content": "Speak."}], ""
    limits = EngineLimits(running=1, tokens=1024, context=512)
    model = ps.load_model("tiny", dtype="float32")
    with running(model, lambda: Engine(model, limits)) as server:
        for line in lines:
            messages.append({"role": "user", "content": line})
            body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12}
            reply = server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": reply})
            expected += reply + "\n"
    result = chat(*lines, options="--dtype float32 --temperature 0 --max-tokens 12 --system Speak.")
    assert (result.exit_code, result.stdout_bytes.decode()) == (0, expected)


def test_replies_are_heard_and_remembered(script: Script) -> None:
    """A prompt holds what was said before; blank lines say nothing, and two slashes say one."""
    script.replies = ["one", "", "three"]
    result = chat("first", "", "  ", "//second", "third")
    assert (result.exit_code, result.stdout) == (0, "one\n\nthree\n")
    assert len(script.engine.asks) == 3
    last = prompts(script)[-1]
    parts = [last.index(part) for part in ("first", "one", "/second", "third")]
    assert parts == sorted(parts)
    assert "//" not in last


def test_thinking_is_no_part_of_the_replies(script: Script) -> None:
    """In a pipe the thinking goes to standard error; a reply that is thinking alone is an empty line."""
    script.replies = ["deep</think>said", "endless"]
    result = chat("a", "b", options="--thinking")
    assert (result.exit_code, result.stdout) == (0, "said\n\n")
    assert result.stderr == "deep\nendless\n"


def test_a_terminal_shows_thinking_apart_and_obeys_no_escapes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a terminal thinking is dimmed, a blank line parts it from the reply, and control characters are shown."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    screen = _Screen()
    for text, is_thinking in (("deep", True), ("er", True), ("a\x1b[2Jb\n\tc", False)):
        screen.show(text, is_thinking)
    screen.finish(has_replied=True)
    heard = capsys.readouterr().out
    assert re.sub(r"\x1b\[[02]m", "", heard) == "deeper\n\na\ufffd[2Jb\n\tc\n"
    assert heard.startswith("\x1b[2mdeep")


def test_commands_change_the_chat(script: Script, tmp_path: Path) -> None:
    """Undo, retry, reset and system change what the model is told; save and load keep it."""
    script.replies = ["one", "two", "other", "three"]
    first, second, third = (tmp_path / name for name in ("first.json", "second.json", "third.json"))
    result = chat(
        *("a", "b", "/retry", f"/save {first}", "/undo", "/system Be kind.", f"/save {second}"),
        *("/reset", f"/load {first}", "/system", "c", f"/save {third}", "/quit", "never said"),
    )
    assert (result.exit_code, result.stdout) == (0, "one\ntwo\nother\nthree\n")
    told = [("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "other")]
    assert saved(first) == told
    assert saved(second) == [("system", "Be kind."), *told[:2]]
    assert saved(third) == [*told, ("user", "c"), ("assistant", "three")]
    asked = prompts(script)
    assert asked[1] == asked[2]
    assert "other" in asked[3]
    assert "two" not in asked[3]


MISTAKES = {
    "unknown command": ("/frobnicate", "/retry"),
    "nothing to undo": ("/undo", "expected a turn"),
    "nothing to retry": ("/retry", "expected a turn"),
    "nothing to tell of": ("/stats", "say something"),
    "no file named": ("/save", "name of a file"),
    "no such file": ("/load nowhere.json", "nowhere.json"),
    "no such folder": ("/save nowhere/talk.json", "nowhere"),
    "not UTF-8": (b"caf\xe9", "UTF-8"),
    "too long": ("word " * 5000, "context"),
}


@pytest.mark.parametrize(("line", "named"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_get_a_message_and_the_chat_goes_on(
    script: Script, line: str | bytes, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be done is one line on standard error; the next turn is taken, and a pipe ends with exit code 1."""
    monkeypatch.chdir(tmp_path)
    script.replies = ["fine"]
    result = chat(line, "hello")
    assert (result.exit_code, result.stdout) == (1, "fine\n")
    assert named in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_conversation_is_not_computed_twice() -> None:
    """The second turn takes over what the first one computed, and the statistics say how much."""
    result = chat("the king of Judah " * 60, "and?", "/stats")
    assert result.exit_code == 0
    cached = int(re.search(r"of these cached\s+│\s+([\d,]+)", result.stderr)[1].replace(",", ""))
    assert cached >= 128
    assert cached % 128 == 0


def test_seeds_repeat_a_chat_and_retries_are_other_replies() -> None:
    """The same seed and lines give the same replies, another reply to a turn is another; without one it is drawn."""
    lines, options = ("In the beginning", "/retry", "/stats"), "--max-tokens 24"
    first, again, other = (chat(*lines, options=f"{options} {seed}") for seed in ("--seed 5", "--seed 5", ""))
    assert first.stdout == again.stdout != other.stdout
    seed = re.search(r"seed\s+│\s+(\d+)", first.stderr)[1]
    assert seed != "5"
    # A retry is an ordinary reply: asked alone with its own seed it is the same.
    alone = chat(lines[0], options=f"{options} --seed {seed}")
    assert first.stdout.endswith(alone.stdout)


@pytest.mark.parametrize("damage", ["no tokenizer", "no frame"])
def test_models_that_cannot_chat_are_refused(tmp_path: Path, damage: str) -> None:
    """Without a tokenizer, or without its tokens for turns, the command says so and what to use; exit code 2."""
    folder = shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    file = folder / "tokenizer.json"
    if damage == "no tokenizer":
        file.unlink()
    else:
        file.write_text(file.read_text(encoding="utf-8").replace("<｜User｜>", "<｜Else｜>"), encoding="utf-8")
    result = chat("hello", options=f"--model {folder}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "purestep generate" in result.stderr


@pytest.mark.parametrize(
    ("option", "named"),
    [("--top-p 7", "top_p"), ("--temperature nan", "temperature"), ("--max-tokens 0", "max-tokens")],
)
def test_options_that_cannot_be_honoured(option: str, named: str) -> None:
    """Sampling that cannot be is refused before anything is said."""
    result = chat("hello", options=option)
    assert (result.exit_code, result.stdout) == (2, "")
    assert named in result.stderr


@examples(50)
@given(st.builds(Talk, system=TEXT | st.just(""), turns=st.lists(TURNS, max_size=4).map(tuple)))
def test_saved_chats_load_as_they_were(tmp_path_factory: pytest.TempPathFactory, talk: Talk) -> None:
    """A chat comes back from its file, and from an object that has its messages."""
    path = tmp_path_factory.mktemp("talk") / "talk.json"
    save_talk(talk, path)
    assert load_talk(path) == talk
    path.write_text(json.dumps({"messages": talk.messages()}))
    assert load_talk(path) == talk


def messages(*roles: str, **changes: Any) -> str:
    """Write messages with some fields of the last one changed."""
    found: list[dict[str, Any]] = [{"role": role, "content": "x"} for role in roles]
    found[-1] |= changes
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "JSON"),
        ("3", "list of messages"),
        ('{"messages": 3}', "list of messages"),
        ("[3]", r"messages\[0\]"),
        (messages("assistant"), r"messages\[0\].*'user'"),
        (messages("user", "user"), r"messages\[1\].*'assistant'"),
        (messages("user", "assistant", "system"), r"messages\[2\].*'user'"),
        (messages("system", "user"), r"messages\[2\].*a reply"),
        (messages("user", "assistant", content=None), r"messages\[1\].*content"),
        (messages("user", "assistant", content=[]), r"messages\[1\].*content"),
        (messages("user", "assistant", content="\ud800"), r"messages\[1\].*content"),
        (messages("user", "assistant", reasoning_content=3), r"messages\[1\].*reasoning_content"),
    ],
)
def test_files_that_hold_no_chat_are_refused(tmp_path: Path, text: str, named: str) -> None:
    """A file that is no chat is refused with the place where it stops being one."""
    path = tmp_path / "talk.json"
    path.write_text(text)
    with pytest.raises(ps.RequestError, match=named):
        load_talk(path)


class Terminal:
    """The other side of a chat at a terminal."""

    def __init__(self, *options: str) -> None:
        self.side, theirs = os.openpty()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb", "PYTHONWARNINGS": "error"}
        command = [sys.executable, "-m", "purestep", "chat", *options]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.heard = ""

    def until(self, pattern: str) -> str:
        """Read until a pattern comes; return what came before its end and forget it."""
        while (match := re.search(pattern, self.heard)) is None:
            ready, _, _ = select.select([self.side], [], [], 60)
            assert ready, f"{pattern!r} never came, but: {self.heard!r}"
            self.heard += os.read(self.side, 4096).decode(errors="replace")
        found, self.heard = self.heard[: match.end()], self.heard[match.end() :]
        return found

    def interrupt_prompt(self) -> str:
        """Press Ctrl-C when the chat waits for a key, where it is heard at once; return what comes up to the prompt."""
        time.sleep(1)
        self.process.send_signal(signal.SIGINT)
        return self.until("> ")

    def write(self, text: str) -> None:
        """Press keys."""
        os.write(self.side, text.encode())


def test_a_terminal_edits_lines_stops_replies_and_ends(tmp_path: Path) -> None:
    """Ctrl-C ends the reply and not the chat, an arrow brings the last line back, Ctrl-D ends with exit code 0."""
    terminal, file = Terminal("--temperature", "0", "--max-tokens", "400"), tmp_path / "talk.json"
    try:
        terminal.until("Ctrl-D ends")
        terminal.until("> ")
        terminal.write("hello\n")
        terminal.until("hello[ \b]*\r\n\\w")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("\n> ")
        terminal.write("/stats\n")
        terminal.until("interrupted")
        terminal.until("\n> ")
        terminal.interrupt_prompt()
        terminal.write("/undo\n")
        terminal.until("turns left: 0")
        terminal.until("> ")
        terminal.write("\x1b[A\x1b[A\x1b[A\n")
        terminal.until("hello[ \b]*\r\n\\w")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("\n> ")
        terminal.write(f"/save {file}\n")
        terminal.until("wrote")
        terminal.until("> ")
        terminal.write("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.side)
    (user, reply) = saved(file)
    assert user == ("user", "hello")
    assert reply[0] == "assistant"
    assert reply[1]


def test_ctrl_c_at_the_prompt_drops_the_line_and_then_ends() -> None:
    """At a prompt with text Ctrl-C drops it; at an empty one it says how to end, and pressed again ends with 130."""
    terminal = Terminal("--temperature", "0", "--max-tokens", "400")
    try:
        terminal.until("\n> ")
        terminal.write("hello\n")
        terminal.until("hello[ \b]*\r\n\\w")
        for _ in range(2):
            terminal.process.send_signal(signal.SIGINT)
        terminal.until("\n> ")
        terminal.write("/stats\n")
        told = terminal.until("interrupted")
        terminal.until("\n> ")
        for _ in range(2):
            terminal.write("half a line")
            terminal.until("half a line")
            told += terminal.interrupt_prompt()
        assert "ends the chat" not in told.rpartition("half a line")[2]
        assert "Ctrl-C again, or Ctrl-D, ends the chat" in terminal.interrupt_prompt()
        terminal.write("/reset\n")
        told += terminal.until("forgot all turns[^>]*> ")
        assert "Ctrl-C again, or Ctrl-D, ends the chat" in terminal.interrupt_prompt()
        time.sleep(1)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(60) == 130
        with suppress(OSError):  # how the other side tells that it is closed
            while rest := os.read(terminal.side, 4096):
                told += rest.decode()
        assert "Traceback" not in told
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.side)


def start(*lines: str, options: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a chat through pipes whose input stays open."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1", "LC_ALL": "C"}
    command = [sys.executable, "-m", "purestep", "chat", "--temperature", "0", *options]
    process = subprocess.Popen(command, env=environment, **pipes)
    process.stdin.write("".join(f"{line}\n" for line in lines).encode())
    process.stdin.flush()
    return process


def test_an_interrupted_pipe_ends_the_chat() -> None:
    """In a pipe Ctrl-C ends all, with exit code 130, and what came is the beginning of a reply."""
    with start("hello", "never answered") as process:
        told = process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        rest, complaints = process.communicate(timeout=60)
    assert (process.returncode, complaints) == (130, b"\n")
    assert len(told + rest) < 4096


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_interrupts_in_a_row_end_a_pipe_without_a_traceback(pause: float) -> None:
    """However often Ctrl-C is pressed, and in whatever moment of the end, nothing but the exit code tells of it."""
    with start("hello", "never answered") as process:
        process.stdout.read(10)
        for _ in range(4):
            process.send_signal(signal.SIGINT)
            time.sleep(pause)
        _, complaints = process.communicate(timeout=60)
    assert (process.returncode, complaints.strip()) == (130, b"")


def test_a_chat_that_nobody_reads_ends_quietly() -> None:
    """A reader that closes the pipe ends the chat without a word."""
    with start("hello") as process:
        assert len(process.stdout.read(5)) == 5
        process.stdout.close()
        assert process.wait(60) == 1
        assert process.stderr.read() == b""
        process.stdin.close()
