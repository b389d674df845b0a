"""The command line: what goes to which stream, how it ends, and that it does what the functions do."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import purestep as ps
import pytest
import torch
from kit.configs import tiny_config
from purestep.model.checkpoint import init_params, write_checkpoint
from purestep.model.leaves import leaves_from_params, params_from_leaves
from purestep.serving.cli import app
from purestep.state.config_reading import config_from_dict
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from typer.testing import CliRunner, Result

CYCLE = "né✓🙂 "
"""What the cycling model says for ever; its bytes are all different, and most characters have several."""

TOKENS = len(CYCLE.encode())
POSITIONS = 4096
RANDOM_POSITIONS = 64


def byte_tokenizer() -> Tokenizer:
    """Build a tokenizer with one token a byte, behind BOS, EOS and padding."""
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2}
    vocabulary |= {letter: 3 + at for at, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<pad>")])
    return tokenizer


def build(folder: Path, positions: int, ratios: tuple[int, ...]) -> ps.Model:
    """Write a random checkpoint with a tokenizer and load it."""
    raw = tiny_config(ratios, vocab=259, hidden=64, index_topk=512, max_positions=positions)
    config = config_from_dict(raw)
    write_checkpoint(folder, config, init_params(config, torch.Generator().manual_seed(7), torch.float32))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return ps.load_model(folder)


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    build(folder, RANDOM_POSITIONS, (0, 4, 128))
    return folder


@pytest.fixture(scope="module")
def cycling_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model that says the next byte of ``CYCLE``: sublayers add nothing, the head undoes the embedding."""
    folder = tmp_path_factory.mktemp("cycling")
    model = build(folder, POSITIONS, (0, 4))
    leaves = leaves_from_params(model.params)
    for path, leaf in leaves.items():
        if path.endswith(("wo_b", "w2", "shared_w2")):
            leaf.zero_()
    signs = torch.randint(0, 2, leaves["embed"].shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    leaves["embed"].copy_(signs)
    leaves["head"].zero_()
    cycle = model.tokenizer.encode(CYCLE).ids
    for token, following in zip([0, *cycle], [cycle[0], *cycle[1:], cycle[0]], strict=True):
        leaves["head"][following] += signs[token]
    write_checkpoint(folder, model.config, params_from_leaves(leaves))
    return folder


@pytest.fixture(scope="module")
def model_name(random_folder: Path) -> str:
    """Name the embedded model, or a random one as long as there is none."""
    embedded = Path(ps.__file__).parent / "model" / "tiny" / "model.safetensors"
    return "tiny" if embedded.is_file() else str(random_folder)


def run(*args: object, stdin: bytes | None = None) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin, prog_name="purestep")


def start(*args: object, **streams: object) -> subprocess.Popen[bytes]:
    """Start a command in a process of its own."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1", "LC_ALL": "C"}
    command = [sys.executable, "-m", "purestep", *map(str, args)]
    return subprocess.Popen(command, env=environment, **(pipes | streams))


def says(n_tokens: int, prompt: str = "n") -> str:
    """Continue the cycle by bytes and keep the characters that are whole."""
    at = CYCLE.encode().index(prompt.encode()) + len(prompt.encode())
    told = (CYCLE * (n_tokens // TOKENS + 2)).encode()[at : at + n_tokens]
    return told.decode(errors="ignore")


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4, 7, 9, 10, 4 * TOKENS])
def test_generate_writes_whole_characters_and_nothing_else(cycling_folder: Path, n_tokens: int) -> None:
    """Standard output holds the bytes of the continuation; characters that span tokens come whole; no word beside."""
    result = run("generate", "n", "--model", cycling_folder, "--max-new-tokens", n_tokens)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout_bytes == says(n_tokens).encode()


@pytest.mark.parametrize("argument", [[], ["-"]])
def test_generate_reads_standard_input_as_it_is(cycling_folder: Path, argument: list[str]) -> None:
    """Without a prompt, or with "-", standard input is the prompt, to the last byte."""
    args = ("generate", *argument, "--model", cycling_folder, "--max-new-tokens", 3, "--echo")
    result = run(*args, stdin=" né✓🙂 ".encode())
    assert (result.exit_code, result.stdout_bytes) == (0, " né✓🙂 né".encode())


def test_generate_equals_the_function(model_name: str) -> None:
    """The command writes what ``generate`` yields for the same parameters, dtype and kernels."""
    params = ps.SamplingParams(temperature=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, seed=5, max_new_tokens=12)
    model = ps.load_model(model_name, dtype="bfloat16", kernels="reference")
    expected = "".join(ps.generate(model, "In the beginning", params))
    flags = "--temperature 0.9 --top-k 50 --min-p 0.01 --repetition-penalty 1.1 --seed 5 --max-new-tokens 12"
    kernels = ("--dtype", "bfloat16", "--kernels", "reference")
    result = run("generate", "In the beginning", "--model", model_name, *flags.split(), *kernels)
    assert result.stdout_bytes.decode() == expected


def test_generate_stops_where_it_is_told(cycling_folder: Path) -> None:
    """Stop tokens end the text, may be held back or ignored, and the statistics name the reason."""
    space = byte_tokenizer().encode(" ").ids[0]
    base = ("generate", "n", "--model", cycling_folder, "--max-new-tokens", 40, "--stats")
    stopped = run(*base, "--stop-token-id", 1, "--stop-token-id", space)
    assert stopped.stdout_bytes.decode() == says(10)
    assert re.search(r"finish reason\s+│\s+stop", stopped.stderr)
    later = run(*base, "--stop-token-id", space, "--min-new-tokens", 11)
    # Held back, the space is replaced by some other byte; nothing ends there.
    assert len(later.stdout_bytes) > len(says(10).encode())
    full = run(*base, "--stop-token-id", 1, "--ignore-eos")
    assert full.stdout_bytes.decode() == says(40)
    assert re.search(r"finish reason\s+│\s+length", full.stderr)


def test_generate_reports_a_seed_that_repeats_the_run(random_folder: Path) -> None:
    """A run without a seed draws one, other than the last, and reports it; given back, it gives the same text."""
    base = ("generate", "In", "--model", random_folder, "--max-new-tokens", 16, "--stats")
    first, second = run(*base), run(*base)
    seeds = [re.search(r"seed\s+│\s+(\d+)", result.stderr)[1] for result in (first, second)]
    assert seeds[0] != seeds[1]
    assert first.stdout_bytes != second.stdout_bytes
    assert run(*base, "--seed", seeds[0]).stdout_bytes == first.stdout_bytes
    for row in ("prompt tokens", "prefill tokens/s", "new tokens", "decode tokens/s", "cache bytes"):
        assert row in first.stderr


def test_generate_streams_and_ends_cleanly_on_interrupt(cycling_folder: Path) -> None:
    """Text arrives while more is being made; Ctrl-C ends with a new line and 130, and what came is a true prefix."""
    with start("generate", "n", "--model", cycling_folder, "--max-new-tokens", POSITIONS - 2) as process:
        told = process.stdout.read(30)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest, complaints = process.communicate(timeout=300)
    assert (process.returncode, complaints) == (130, b"\n")
    assert len(told + rest) < POSITIONS
    assert says(POSITIONS).encode().startswith(told + rest)


def test_generate_ends_quietly_when_nobody_reads(cycling_folder: Path) -> None:
    """A reader that closes the pipe ends the run without a word."""
    with start("generate", "n", "--model", cycling_folder, "--max-new-tokens", POSITIONS - 2) as process:
        assert len(process.stdout.read(10)) == 10
        process.stdout.close()
        complaints = process.stderr.read()
        assert process.wait(timeout=300) == 1
    assert complaints == b""


def test_progress_goes_to_a_terminal_and_never_into_the_text(cycling_folder: Path) -> None:
    """With a terminal on standard error a bar is shown there, while the pipe gets the text alone."""
    ours, theirs = os.openpty()
    streams = {"stdin": subprocess.PIPE, "stderr": theirs}
    shown: list[bytes] = []
    # Somebody has to watch the terminal, or the writer waits for ever once its buffer is full.
    watcher = threading.Thread(target=watch, args=(ours, shown))
    with start("generate", "--model", cycling_folder, "--max-new-tokens", 3, **streams) as process:
        os.close(theirs)
        watcher.start()
        told, _ = process.communicate((CYCLE * 100 + "n").encode(), timeout=300)
    watcher.join()
    os.close(ours)
    assert (process.returncode, told) == (0, says(3).encode())
    assert b"loading" in b"".join(shown)
    assert b"prompt" in b"".join(shown)


def watch(terminal: int, shown: list[bytes]) -> None:
    """Collect what is written to a terminal until its last writer is gone."""
    try:
        while chunk := os.read(terminal, 4096):
            shown.append(chunk)
    except OSError as error:
        # How Linux says that nobody holds the other end any more.
        if error.errno != errno.EIO:
            raise


MISTAKES = {
    "no such folder": (["generate", "x", "--model", "nowhere"], "nowhere"),
    "word for number": (["generate", "x", "--top-k", "many"], "--top-k"),
    "number out of range": (["generate", "x", "--top-p", "7"], "top_p"),
    "not a number": (["generate", "x", "--temperature", "nan"], "temperature"),
    "no tokens wanted": (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens"),
    "stop token unknown": (["generate", "x", "--model", "{random}", "--stop-token-id", "259"], "stop_token_ids"),
    "empty prompt": (["generate", ""], "prompt"),
    "empty input": (["generate"], "standard input"),
    "prompt too long": (["generate", "x" * RANDOM_POSITIONS, "--model", "{random}"], "64 positions"),
    "prompt not UTF-8": (["generate", "\udcff"], "UTF-8"),
    "unknown dtype": (["generate", "x", "--model", "{random}", "--dtype", "int3"], "dtype"),
    "unknown kernels": (["generate", "x", "--model", "{random}", "--kernels", "magic"], "kernels"),
    "no such file": (["score", "nowhere.txt"], "nowhere.txt"),
    "folder for file": (["score", "{random}"], "directory"),
    "no file named": (["score"], "files"),
    "file not UTF-8": (["score", "{random}/latin1.txt"], "0xe9 at 3"),
    "empty file": (["score", "{random}/empty.txt"], "empty.txt"),
    "context too long": (["score", "{random}/config.json", "--model", "{random}", "--context", "65"], "1..64"),
    "no context": (["score", "{random}/config.json", "--model", "{random}", "--context", "0"], "1..64"),
    "stride too long": (["score", "{random}/config.json", "--model", "{random}", "--stride", "65"], "stride"),
    "no windows": (["score", "{random}/config.json", "--model", "{random}", "--batch", "0"], "batch"),
    "no config": (["info", "{random}/nowhere"], "config.json"),
    "no requests": (["info", "{random}", "--requests", "0"], "requests"),
    "context beyond the model": (["info", "{random}", "--context", "65"], "64 positions"),
    "unknown form": (["convert", "{random}", "{random}/out", "--form", "int3"], "fp4, fp8, bf16, f32"),
    "unknown names": (["convert", "{random}", "{random}/out", "--names", "mine"], "official, transformers"),
    "layers not numbers": (["make-tiny", "{random}/out", "--layers", "a"], "0,2,5-8"),
    "layers not there": (["make-tiny", "{random}/out", "--source", "{random}", "--layers", "7"], "0..2"),
    "no such command": (["frobnicate"], "frobnicate"),
    "no such option": (["--frobnicate"], "--frobnicate"),
}


@pytest.mark.parametrize(("args", "named"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_get_one_line(random_folder: Path, args: list[str], named: str) -> None:
    """What the user got wrong is said in one line on standard error that names it, with exit code 2."""
    (random_folder / "latin1.txt").write_bytes(b"caf\xe9")
    (random_folder / "empty.txt").write_bytes(b"")
    result = run(*(arg.replace("{random}", str(random_folder)) for arg in args), stdin=b"")
    assert (result.exit_code, result.stdout) == (2, "")
    assert named in result.stderr
    assert result.stderr.count("\n") == 1


def test_damage_is_told_as_the_library_tells_it(random_folder: Path, tmp_path: Path) -> None:
    """A checkpoint that cannot be read is a failure: exit code 1 and the error's own message."""
    (tmp_path / "config.json").write_bytes((random_folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ps.CheckpointError) as told:
        ps.load_model(tmp_path)
    result = run("generate", "x", "--model", tmp_path)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"{told.value}\n")


def test_ignored_files_are_a_note(random_folder: Path, tmp_path: Path) -> None:
    """What loading leaves aside is said in one line on standard error, and the run goes on."""
    for file in random_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "stray.safetensors").write_bytes(b"")
    result = run("generate", "x", "--model", tmp_path, "--max-new-tokens", 1)
    assert result.exit_code == 0
    assert re.fullmatch(r"note: .*stray\.safetensors.*\n", result.stderr)


def test_score_counts_exactly_the_bytes_of_the_files(
    model_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes, tokens and bits of every file, also of standard input, add up to the total; by token it is the same."""
    monkeypatch.chdir(tmp_path)
    texts = {"a.txt": "In the beginning God created\r\nthe heaven.\n", "[b].txt": "\ufeffé✓🙂", "-": "x"}
    for name in ("a.txt", "[b].txt"):
        Path(name).write_bytes(texts[name].encode())
    base = ("score", *texts, "--model", model_name, "--dtype", "float32", "--context", 16, "--json")
    result = run(*base, stdin=texts["-"].encode())
    assert (result.exit_code, result.stderr) == (0, "")
    assert all(name in result.stdout for name in texts)
    found = json.loads(result.stdout.splitlines()[-1])
    assert [one["file"] for one in found["files"]] == list(texts)
    assert [one["n_bytes"] for one in found["files"]] == [len(text.encode()) for text in texts.values()]
    for name in ("n_bytes", "n_tokens", "bits"):
        assert found["total"][name] == pytest.approx(sum(one[name] for one in found["files"]))
    assert found["total"]["bits_per_byte"] == found["total"]["bits"] / found["total"]["n_bytes"]
    other = json.loads(run(*base, "--by-token", "--batch", 3, stdin=b"x").stdout.splitlines()[-1])
    assert other["total"]["bits"] == pytest.approx(found["total"]["bits"], rel=1e-4)


def test_info_describes_the_model(model_name: str) -> None:
    """Configuration, layers, parameters and cache sizes are shown for a checkpoint."""
    model = ps.load_model(model_name)
    result = run("info", model_name, "--context", 60, "--requests", 3)
    assert (result.exit_code, result.stderr) == (0, "")
    state = ps.init_state(model, ps.Capacity(requests=3, tokens=180, context=60))
    for shown in (f"{state.kv.handle.nbytes:,}", "3 x 60 tokens", "bytes in files", "met by one token", "C4 entries"):
        assert shown in result.stdout


def test_checkpoints_are_made_cut_and_converted(random_folder: Path, tmp_path: Path) -> None:
    """A toy is drawn, a part of a checkpoint taken, its form changed; the tokenizer comes along, the text goes on."""
    made = run("make-tiny", tmp_path / "toy", "--form", "fp8", "--draft", "--seed", 3)
    assert (made.exit_code, made.stdout) == (0, "")
    assert "layers: 4, experts: 8" in made.stderr
    cut = run("make-tiny", tmp_path / "part", "--source", random_folder, "--layers", "0,2", "--experts", 4)
    assert cut.exit_code == 0
    assert "layers: 2, experts: 4" in cut.stderr
    converted = run("convert", tmp_path / "part", tmp_path / "out", "--form", "bf16", "--names", "transformers")
    assert (converted.exit_code, converted.stdout) == (0, "")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (random_folder / "tokenizer.json").read_bytes()
    texts = [
        run(
            "generate", "x", "--model", tmp_path / name, "--temperature", 0, "--max-new-tokens", 8, "--dtype", "float32"
        )
        for name in ("part", "out")
    ]
    assert [text.exit_code for text in texts] == [0, 0]
    again = run("convert", tmp_path / "part", tmp_path / "out")
    assert again.exit_code == 1
    assert "expected an empty folder" in again.stderr
    shown = run("info", tmp_path / "toy")
    assert "draft block" in shown.stdout
    assert "F8_E4M3" in shown.stdout


def test_version_and_help() -> None:
    """``--version`` tells the version, and no command at all shows what there is."""
    assert re.fullmatch(r"purestep \d+\.\d+\.\d+\n", run("--version").stdout)
    result = run()
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("generate", "score", "info", "convert", "make-tiny"))
