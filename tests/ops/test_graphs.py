"""Compiled graphs: traced once, compiled here or by helpers, kept in files by everything that decides their code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from purestep.ops import graph as graphs
from purestep.ops import kept, packed
from purestep.ops.dispatch import REFERENCE
from purestep.ops.experts import ExpertMath
from purestep.ops.graph import Draft, Graph, compile_drafts, compile_graph, draft_graph
from purestep.ops.helper import Helper
from torch import Tensor
from torch._inductor import metrics
from torch.utils import _pytree as pytree

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="graphs are compiled by a C++ compiler"
)

X = torch.arange(6.0).view(2, 3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep what is compiled in a folder of this test's own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "purestep"


def scaled(x: Tensor, by: float) -> Tensor:
    """Any function."""
    return (x * by).sin() + 1


def drafts_of(*factors: float, about: Any = "scaled") -> list[Draft]:
    """Trace one graph for every factor."""
    found = [draft_graph(scaled, (X, by), about=about) for by in factors]
    assert all(isinstance(one, Draft) for one in found)
    return found  # type: ignore[return-value]


@needs_compiler
def test_a_kept_graph_is_loaded_and_computes_the_same(folder: Path) -> None:
    """The second time nothing is traced, and the bits are those of the first."""
    first = compile_graph(scaled, (X, 2.5), about="scaled")

    def never(x: Tensor, by: float) -> Tensor:
        raise AssertionError("traced again")

    again = draft_graph(never, (X, 2.5), about="scaled")
    assert isinstance(again, Graph)
    assert torch.equal(first([X, 2.5])[0], again([X, 2.5])[0])
    torch.testing.assert_close(again([X, 2.5])[0], scaled(X, 2.5))
    assert again.places == first.places
    assert again.n_operators == first.n_operators


@needs_compiler
def test_a_graph_of_free_lengths_is_loaded_with_them(folder: Path) -> None:
    """What was compiled for any length of an axis, and writes into its argument, does both after loading."""

    def add_row(pool: Tensor, at: Tensor) -> Tensor:
        pool[at] = pool[at] + 1
        return pool[at] * 2

    args = (torch.zeros(5, 3), torch.tensor([1]))
    for graph in (compile_graph(add_row, args, {0: 0}, about="row"), draft_graph(add_row, args, {0: 0}, about="row")):
        assert isinstance(graph, Graph)
        pool, at = torch.zeros(117, 3), torch.tensor([98])
        (found,) = graph([pool, at])
        assert torch.equal(found, torch.full((1, 3), 2.0))
        assert pool[98].tolist() == [1, 1, 1]
        assert int(pool.count_nonzero()) == 3


@needs_compiler
@pytest.mark.parametrize("name", ["code", "note", "both", "empty note", "missing"])
def test_a_damaged_file_is_compiled_again(folder: Path, name: str) -> None:
    """Whatever is cut short or gone costs time and nothing else."""
    compile_graph(scaled, (X, 2.5), about="scaled")
    (note,) = folder.glob("*.json")
    code = note.with_suffix("")
    if name == "missing":
        code.unlink()
    if name in ("code", "both"):
        code.write_bytes(code.read_bytes()[:100])
    if name in ("note", "both"):
        note.write_text('{"places": [')
    if name == "empty note":
        note.write_text("{}")
    assert isinstance(draft_graph(scaled, (X, 2.5), about="scaled"), Draft)
    graph = compile_graph(scaled, (X, 2.5), about="scaled")
    torch.testing.assert_close(graph([X, 2.5])[0], scaled(X, 2.5))
    assert isinstance(draft_graph(scaled, (X, 2.5), about="scaled"), Graph)


@needs_compiler
@pytest.mark.parametrize("damaged", ["*.main.so", "*.so"])
def test_damaged_machine_code_is_named(folder: Path, damaged: str) -> None:
    """Machine code that was cut short, the graph's or what the compiler learnt of the machine: told what to do."""
    script = (
        "import torch, purestep as ps\n"
        "from purestep.ops.graph import compile_graph\n"
        "x = torch.arange(6.0)\n"
        "try:\n    compile_graph(lambda x: x.sin() + 1, (x,), about='sine')\n"
        "except ps.ConfigError as error:\n    print(error)"
    )

    def said() -> str:
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert said() == ""
    for path in folder.parent.rglob(damaged):
        path.write_bytes(path.read_bytes()[:100])
    assert "TORCHINDUCTOR_CACHE_DIR" in said()


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    """A file where the folder should be is one error that says what to do."""
    script = (
        "import purestep as ps\n"
        "try:\n    ps.compile_step(ps.load_model('tiny'), ((1, 64),))\n"
        "except ps.ConfigError as error:\n    print(error)"
    )
    file = tmp_path / "file"
    file.touch()
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(file)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert "TORCHINDUCTOR_CACHE_DIR" in done.stdout, done.stderr[-2000:]


def key_of(*args: Any, about: Any = ("a", 1), free: dict[int, int] | None = None) -> str | None:
    """Name a graph."""
    leaves, spec = pytree.tree_flatten(args)
    return graphs._key(about, leaves, spec, free or {})


def test_everything_that_decides_code_decides_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, strides, dtypes, constants, structure, what the function knows, our code, torch, threads: all count."""
    x = torch.zeros(4, 4)
    keys = [
        key_of(x, 1),
        key_of(x, 1, about=("a", 2)),
        key_of(x, 1, free={0: 0}),
        key_of(x, 1, free={0: 1}),
        key_of(x, 2),
        key_of(x, 1.0),
        key_of(x, True),
        key_of(x, None),
        key_of(x, "1"),
        key_of(x, [1]),
        key_of((x, 1)),
        key_of(x.double(), 1),
        key_of(x.t(), 1),
        key_of(x[:3], 1),
        key_of(x[:, :3], 1),
        key_of(x, torch.zeros(1).numpy()),
        key_of(x, torch.ones(1).numpy()),
        key_of(x, torch.ones(1).double().numpy()),
    ]
    for name, found in (("_own_code", "other"), ("_surroundings", ("other",))):
        with monkeypatch.context() as patch:
            patch.setattr(graphs, name, lambda found=found: found)
            keys.append(key_of(x, 1))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        keys.append(key_of(x, 1))
    finally:
        torch.set_num_threads(threads)
    with torch._inductor.config.patch(max_autotune=True):
        keys.append(key_of(x, 1))
    assert None not in keys
    assert len({*keys}) == len(keys)
    assert key_of(torch.ones(4, 4), 1) == keys[0], "numbers do not count"


def test_what_nobody_can_describe_is_not_kept() -> None:
    """An argument whose text need not say what it is names no file."""
    assert key_of(object()) is None
    assert key_of(X, lambda: 1) is None


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


@needs_compiler
def test_a_helper_compiles_the_same(folder: Path) -> None:
    """What a helper compiles computes what it should, in the order of the drafts, and progress counts every one."""
    seen: list[int] = []
    drafts = drafts_of(1.5, 2.5, 3.5, 4.5, about=None) + drafts_of(5.5)
    with Helper() as helper:
        new = compile_drafts(drafts, [helper], seen.append, meanwhile=lambda: require(within(120, lambda: bool(seen))))
    assert seen == [1, 2, 3, 4, 5]
    for by, (graph, seconds) in zip((1.5, 2.5, 3.5, 4.5, 5.5), new, strict=True):
        torch.testing.assert_close(graph([X, by])[0], scaled(X, by))
        assert seconds > 0


def require(holds: bool) -> None:
    """Fail where the helper never finished anything."""
    assert holds, "the helper compiled nothing"


@needs_compiler
def test_dead_helpers_cost_time_only(folder: Path) -> None:
    """Without its helpers everything is compiled here."""
    helpers = [Helper(), Helper()]
    for helper in helpers:
        helper._process.kill()
    seen: list[int] = []
    new = compile_drafts(drafts_of(1.5, 2.5), helpers, seen.append, meanwhile=lambda: time.sleep(1))
    assert seen == [1, 2]
    torch.testing.assert_close(new[1][0]([X, 2.5])[0], scaled(X, 2.5))


@needs_compiler
def test_an_interrupt_ends_the_helpers(folder: Path) -> None:
    """Whatever interrupts compiling leaves no process behind, and does not wait for one."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    helper = Helper()
    with pytest.raises(KeyboardInterrupt):
        compile_drafts(drafts_of(1.5, 2.5), [helper], meanwhile=interrupt)
    assert helper._process.poll() is not None


def test_weights_packed_as_one_meet_their_rows_once() -> None:
    """Products with parts of one packed weight are one product; with two weights alike in shape they are two."""

    def both(x: Tensor, a: packed.PackedWeight, b: packed.PackedWeight) -> tuple[Tensor, Tensor]:
        return packed.linear(x, a), packed.linear(x, b)

    def n_products(*pair: packed.PackedWeight) -> int:
        found = draft_graph(both, (torch.zeros(8, 16), *pair))
        assert isinstance(found, Draft)
        targets = [node.target for node in found.trace.module.graph.nodes]
        return targets.count(torch.ops.purestep.packed_linear.default)

    w = torch.randn(32, 16)
    together = packed.pack(w[:16], w[16:])
    apart = (*packed.pack(w[:16]), *packed.pack(w[16:]))
    assert n_products(*together) == 1
    assert n_products(*apart) == 2
    x = torch.zeros(8, 16)
    assert key_of(x, together[0].blocks, together[1].blocks) != key_of(x, apart[0].blocks, apart[0].blocks.clone())


@needs_compiler
def test_kept_rows_are_stored(folder: Path) -> None:
    """What meets every row of a weight is one buffer more, and not computed again for each of them."""

    def count(keep: Callable[[Tensor], Tensor]) -> int:
        before = metrics.ir_nodes_pre_fusion
        w, x = torch.zeros(24, 8), torch.zeros(8)
        graph = compile_graph(lambda x, w: (w * keep(x * 2 + 1)).sum(-1), (x, w))
        w, x = torch.randn(24, 8), torch.randn(8)
        torch.testing.assert_close(graph([x, w])[0], w @ (x * 2 + 1))
        return metrics.ir_nodes_pre_fusion - before

    assert count(kept.kept) == count(lambda x: x) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "how",
    [ExpertMath(), ExpertMath(weighs_after=True), ExpertMath(rounds_steps=True), ExpertMath(rounds_inner=True)],
)
@pytest.mark.parametrize("n_rows", [1, 7, 40])
def test_experts_on_packed_weights_are_the_plain_experts(n_rows: int, how: ExpertMath, dtype: torch.dtype) -> None:
    """However rows share experts, products with packed weights give what expert by expert gives."""
    draw = torch.Generator().manual_seed(n_rows)
    x = torch.randn(n_rows, 128, generator=draw).to(dtype)
    ids = torch.stack([torch.randperm(6, generator=draw)[:3] for _ in range(n_rows)])
    weights = torch.rand(n_rows, 3, generator=draw)
    w13 = (torch.randn(6, 512, 128, generator=draw) / 12).to(dtype)
    w2 = (torch.randn(6, 128, 256, generator=draw) / 16).to(dtype)
    stacks = [packed.pack_stack(w.float().unbind(0)) for w in (w13, w2)]
    plain = REFERENCE.experts(x, ids, weights, w13, w2, 2.0, how=how)
    found = packed.experts(x, ids, weights, *stacks, 2.0, how=how)
    tolerance = 1e-4 if dtype is torch.float32 and not how.rounds_inner else 0.05
    torch.testing.assert_close(found, plain, atol=tolerance, rtol=tolerance)
