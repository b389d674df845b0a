"""From a function on trees of tensors to machine code for its shapes.

A graph is traced (``ops/tracing.py``), compiled (``ops/compiling.py``), several of them in several processes
(``ops/helper.py``), and kept in a file, by what decides its code: this package's own code, torch and the machine, what
the compiler was told, what the function depends on, and its arguments. A later process loads that file, without tracing
anything. Tracing is ours and not the compiler's front end, because the caller knows when shapes fit: a call then checks
nothing.

Source: none.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from types import MappingProxyType
from typing import Any, Final

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .fused import EMULATES_BF16
from .graph_errors import folder_error
from .helper import Helper

__all__ = ["Draft", "Graph", "compile_drafts", "compile_graph", "draft_graph"]

_PACKAGE: Final = Path(__file__).parents[1]
_LAYERS: Final = ("state", "ops", "model", "step")
_PLAIN: Final = (int, float, bool, str, bytes, type(None), torch.dtype, Enum)


@attrs.frozen(eq=False)
class Graph:
    """A compiled function.

    Attributes:
        call: takes the tensors at ``places``, in order; returns the tensors of the result, in order.
        places: which leaves of the arguments it reads or writes.
        n_operators: how many the traced function calls.
    """

    call: Callable[..., Sequence[Tensor]]
    places: tuple[int, ...]
    n_operators: int

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        """Run on the leaves of arguments of the shapes that were compiled; returns the leaves of the result."""
        return self.call(*map(leaves.__getitem__, self.places))


@attrs.frozen(eq=False)
class Draft:
    """A graph that was traced and is still to be compiled.

    Attributes:
        trace: what to compile.
        places: as in ``Graph``.
        key: of its file; None where nobody can say what its code depends on.
    """

    trace: Any
    places: tuple[int, ...]
    key: str | None

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        """Return zeros of the result's shapes, so that what follows can be traced."""
        return [like.empty().zero_() for like in self.trace.results]

    def run(self, leaves: Sequence[Any]) -> None:
        """Run it operator by operator, for those that make a kernel of their own when they first run."""
        self.trace.module(*[leaves[at] for at in self.places])

    @property
    def n_operators(self) -> int:
        """As in ``Graph``."""
        found: int = self.trace.n_operators
        return found


def draft_graph(
    function: Callable[..., Any],
    args: Sequence[Any],
    free: Mapping[int, int] = MappingProxyType({}),
    *,
    about: Any = None,
    is_fused: bool = True,
) -> Graph | Draft:
    """Load a graph, or trace it.

    Args:
        function: of trees of tensors and constants to a tree of tensors; it may write into its arguments.
        args: arguments of the right shapes; they are neither read nor written.
        free: leaf of the arguments -> its axis that may have any other length above 1 in a later call.
        about: what the function depends on besides this package's code and its arguments, as a value whose ``repr``
            says everything; None if unknown.
        is_fused: whether operators may be computed together, in another order; if not, they are called one by one.
    Returns:
        A graph that was compiled before or needs no compiling, or a draft.
    """
    leaves, spec = pytree.tree_flatten(tuple(args))
    key = _key(about, leaves, spec, free) if is_fused and about is not None else None
    if key is not None and (found := _loaded(key)) is not None:
        return found
    at = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def flat(*tensors: Tensor) -> list[Tensor]:
        changed = dict(zip(at, tensors, strict=True))
        given = [changed.get(place, leaf) for place, leaf in enumerate(leaves)]
        found: list[Tensor] = pytree.tree_leaves(function(*pytree.tree_unflatten(given, spec)))
        return found

    numbers = {at.index(place): axis for place, axis in free.items()}
    trace = _module("tracing").trace(flat, [leaves[place] for place in at], numbers)
    places = tuple(at[number] for number in trace.places)
    return Draft(trace, places, key) if is_fused else Graph(trace.module.forward, places, trace.n_operators)


def compile_drafts(
    drafts: Sequence[Draft],
    helpers: Sequence[Helper] = (),
    progress: Callable[[int], None] = lambda done: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[tuple[Graph, float]]:
    """Compile drafts, here and in helpers.

    Args:
        drafts: any number.
        helpers: that compile, too; ended when nothing is left.
        progress: told how many are done, from any thread.
        meanwhile: done here while others compile already.
    Returns:
        Of every draft (graph, seconds that compiling it took).
    Raises:
        ConfigError: this machine has no C++ compiler.
    """
    if not drafts:
        meanwhile()
        return []
    compiling, calls, seconds = _module("compiling"), dict[int, Any](), dict[int, float]()
    # The longest last, because they are taken from there; taking one is a single operation.
    todo = sorted(range(len(drafts)), key=lambda at: drafts[at].n_operators)
    lock = Lock()
    with TemporaryDirectory() as scratch:
        paths = [Path(scratch) / str(at) if one.key is None else _file(one.key) for at, one in enumerate(drafts)]

        def finish(at: int, took: float) -> None:
            with lock:
                seconds[at] = took
                progress(len(seconds))

        def compile_here(at: int) -> None:
            calls[at], took = compiling.compile_trace(drafts[at].trace, paths[at])
            finish(at, took)

        def compile_there(helper: Any) -> list[int]:
            """Let a helper compile what it can: what it could not."""
            for at in _taken(todo):
                try:
                    finish(at, helper.compile(drafts[at].trace, paths[at]))
                except (OSError, EOFError, ValueError):  # it is gone, or says why not: that is tried again here
                    return [at]
            return []

        with ThreadPoolExecutor(max(len(helpers), 1)) as pool, ExitStack() as stack:
            waiting = [pool.submit(compile_there, stack.enter_context(helper)) for helper in helpers]
            try:
                meanwhile()
                for at in _taken(todo):
                    compile_here(at)
            except BaseException:
                todo.clear()
                raise
            for at in [at for one in waiting for at in one.result()]:
                compile_here(at)
        found = []
        for at, draft in enumerate(drafts):
            call = calls[at] if at in calls else compiling.load(paths[at])
            if draft.key is not None:
                _note(draft.key, draft.places, draft.n_operators)
            found.append((Graph(call, draft.places, draft.n_operators), seconds[at]))
    return found


def _taken(todo: list[int]) -> Iterator[int]:
    while True:
        try:
            yield todo.pop()
        except IndexError:
            return


def compile_graph(
    function: Callable[..., Any],
    args: Sequence[Any],
    free: Mapping[int, int] = MappingProxyType({}),
    *,
    about: Any = None,
) -> Graph:
    """Load a graph, or trace and compile it; see ``draft_graph``."""
    found = draft_graph(function, args, free, about=about)
    return compile_drafts([found])[0][0] if isinstance(found, Draft) else found


def _module(name: str) -> Any:
    """Import what takes seconds to import; the compiler makes its folder at that."""
    try:
        return import_module(f".{name}", __package__)
    except OSError as error:
        raise folder_error(error) from error


def _file(key: str) -> Path:
    path: Path = _module("compiling").folder() / key
    return path


def _note(key: str, places: Sequence[int], n_operators: int) -> None:
    """Write down what belongs to a graph's code; a graph without it is none."""
    path = _file(key).with_suffix(".json")
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"places": list(places), "n_operators": n_operators}))
    fresh.replace(path)


def _loaded(key: str) -> Graph | None:
    path = _file(key)
    try:
        noted = json.loads(path.with_suffix(".json").read_text())
        return Graph(_module("compiling").load(path), tuple(noted["places"]), noted["n_operators"])
    except Exception:  # not there, cut short, cleared away in part, of another torch: it is compiled
        return None


def _key(about: Any, leaves: Sequence[Any], spec: Any, free: Mapping[int, int]) -> str | None:
    """Name a graph by everything that its code depends on."""
    described = [_described(leaf) for leaf in leaves]
    if None in described:
        return None
    same = _module("tracing").first_places([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    chosen = sorted(_module("compiling").choices().items())
    text = repr((_surroundings(), chosen, about, described, same, spec, dict(free)))
    return hashlib.sha256(text.encode()).hexdigest()


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        chip = torch.cuda.get_device_name(leaf.device) if leaf.is_cuda else None
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.layout, chip)
    if hasattr(leaf, "tobytes"):
        return (leaf.shape, leaf.dtype, leaf.tobytes())
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) else None


def _surroundings() -> Any:
    cpu = torch.backends.cpu.get_cpu_capability()
    return (
        *(_own_code(), torch.__version__, torch.version.git_version, torch.are_deterministic_algorithms_enabled()),
        *(platform.python_version(), platform.machine(), cpu, EMULATES_BF16, torch.get_num_threads()),
    )


@cache
def _own_code() -> str:
    """Digest what traces are made by; read once, as it was imported once."""
    found = hashlib.sha256()
    for layer in _LAYERS:
        for path in sorted((_PACKAGE / layer).rglob("*.py")):
            found.update(f"{path.relative_to(_PACKAGE)}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()
