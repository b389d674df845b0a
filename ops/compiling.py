"""From a trace to machine code in a file.

In a module of its own because importing the compiler takes seconds: ``ops/graph.py`` does so when it is first needed.

Source: none; ``torch._inductor.standalone_compile``.
"""

from __future__ import annotations

import pickle
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from torch._inductor import config, standalone_compile
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
from torch._inductor.ir import FixedLayout, TensorBox
from torch._inductor.lowering import register_lowering
from torch._inductor.mkldnn_ir import LinearUnary
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.standalone_compile import CompiledArtifact
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .graph_errors import compiler_error, folder_error
from .tracing import Call, Trace, fakes_of

__all__ = ["choices", "compile_trace", "folder", "load", "message", "serve"]

_OPTIONS: Final = {
    # Packed weights are opaque, and have no strides to compare.
    "size_asserts": False,
    # Every rounding that the functions ask for happens, also where a wider number is at hand.
    "emulate_precision_casts": True,
    # Slots come from the request table, which the invariants check.
    "assert_indirect_indexing": False,
}

_FAILURES: Final = (InductorError, CppCompileError, OSError, ImportError)
"""Of compiling; an ImportError is machine code that cannot be loaded."""


def choices() -> dict[str, Any]:
    """Return everything that was chosen for the compiler, by anybody."""
    return config.save_config_portable()


def folder() -> Path:
    """Return where compiled graphs are kept: in the compiler's own folder, whose files they refer to."""
    return Path(cache_dir()) / "purestep"


def compile_trace(trace: Trace, path: Path) -> tuple[Call, float]:
    """Compile a trace, and write it to a file.

    Args:
        trace: of a function.
        path: of a file that may exist.
    Returns:
        (call, seconds): what takes the trace's inputs; how long it took.
    Raises:
        ConfigError: this machine has no C++ compiler, or no folder for what it makes.
    """
    start = time.perf_counter()
    given: list[Any] = fakes_of(trace.inputs)
    # On a CPU kernels are called from C++: from Python, calling a small one takes as long as it does.
    options = {**_OPTIONS, "cpp_wrapper": all(one.device.type == "cpu" for one in given)}
    try:
        with torch.no_grad():
            call = standalone_compile(
                trace.module, given, dynamic_shapes="from_graph", options={"config_patches": options}
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        call.save(path=str(path))
    except _FAILURES as error:
        reason = error.inner_exception if isinstance(error, InductorError) else error
        if isinstance(reason, (InvalidCxxCompiler, CppCompileError)):
            raise compiler_error() from error
        if isinstance(reason, (OSError, ImportError)):
            raise folder_error(reason) from error
        raise
    return call, time.perf_counter() - start


def load(path: Path) -> Call:
    """Load what was written."""
    return CompiledArtifact.load(path=str(path))


def message(trace: Trace, path: Path) -> bytes:
    """Put into bytes what ``serve`` compiles: a trace, its file, and how."""
    return GraphPickler.dumps((trace, str(path), torch.get_num_threads(), choices()), Options(ops_filter=None))


def serve(number: int) -> None:
    """Compile what comes over a connection until its other end is closed; see ``ops/helper.py``.

    Args:
        number: of the connection's file.
    """
    connection = Connection(number)
    while True:
        try:
            task = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_done(task)))


def _done(task: bytes) -> float | str:
    try:
        read: Any = GraphPickler.loads(task, FakeTensorMode(shape_env=ShapeEnv()))
        trace, path, n_threads, chosen = read
        torch.set_num_threads(n_threads)
        config.load_config(chosen)
        return compile_trace(trace, Path(path))[1]
    except Exception as error:  # whoever asked compiles it itself, and gets the error
        return repr(error)


# What follows is not part of the key under which the compiler keeps its own files: an operator whose lowering changes
# needs another name, or old code is found for it.


@register_lowering(torch.ops.purestep.kept.default, type_promotion_kind=None)
def _kept(x: Any) -> Any:
    """Store a tensor here, and read it wherever it is used."""
    x.realize()
    return x


@register_lowering(torch.ops.purestep.packed_linear.default, type_promotion_kind=None)
def _packed_linear(x: Any, w: Any) -> Any:
    """Call the library's product as the compiler's own code does, past the dispatcher."""
    rows = LinearUnary.require_contiguous(LinearUnary.realize_input(x))
    # Without the compiler's own check of the weight's strides: a packed one has none.
    given = [rows, LinearUnary.realize_input(w)]
    layout = FixedLayout(device=x.get_device(), dtype=x.get_dtype(), size=[*x.get_size()[:-1], w.get_size()[0]])
    return TensorBox.create(LinearUnary(layout=layout, inputs=given, constant_args=[None, "none", [-1], ""]))
