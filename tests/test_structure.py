"""The structure that the architecture promises: layers, folders, names, one copy of everything, no hidden inputs."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import attrs
import purestep as ps
import pytest
from purestep.state.dims import AXES, DTYPES

ROOT = Path(__file__).parents[1]
PACKAGE = Path(ps.__file__).parent  # the same place, or where the package is installed
LAYERS = ("state", "ops", "model", "step", "serving")
SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
IDS = [str(path.relative_to(ROOT)) for path in SOURCES]

# The names that scripts outside the repository use; they may grow and never change.
CONTRACT = [
    *("Capacity", "Model", "Numerics", "Parallel", "SamplingParams", "load_model", "init_state", "open_request"),
    *("extend_step", "decode_step", "fork_request", "close_request", "save_state", "restore_state", "generate"),
    *("prepare_decode", "forward_batch", "forward", "sample", "relay", "commit", "layer_step", "forward_sequence"),
    *("invariants", "strategies", "PurestepError", "CapacityError", "CheckpointError", "ConfigError", "DtypeError"),
    *("RequestError", "ShapeError", "StateBusyError"),
]
BESIDES = [
    *("Config", "DecodeState", "ForwardBatch", "KVState", "MHCState", "SamplingState", "ScheduleBatch", "StepOutput"),
    *(
        "Captured",
        "Difference",
        "ExportedRequest",
        "FedToken",
        "RankError",
        "Request",
        "Trace",
        "find_request",
        "first_difference",
    ),
    *("export_request", "import_request", "load_request", "save_request", "load_run", "save_run", "prepare_extend"),
    *("retract_request", "rewind_request", "trace_step", "CompiledStep", "compile_step"),
]

ROOT_ENTRIES = {
    "pyproject.toml", "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE", "__init__.py", "__main__.py",
    "py.typed", ".ci", ".gitignore", *LAYERS, "tests", "examples",
}  # fmt: skip

THIRD_PARTY = {
    "state": {"torch", "numpy", "attrs"},
    "ops": {"torch", "attrs"},
    "model": {"torch", "numpy", "attrs", "safetensors", "tokenizers"},
    "step": {"torch", "numpy", "attrs", "safetensors", "tokenizers", "hypothesis"},
    "serving": {
        *("torch", "numpy", "attrs", "tokenizers", "typer", "rich", "click"),
        *("aiohttp", "deepseek_recipe", "llguidance", "prometheus_client", "transformers"),
    },
}
HOST_READS = {"item", "tolist", "cpu", "numpy", "nonzero"}
AMBIENT = {"time", "os", "logging", "random", "secrets", "datetime", "threading", "contextvars"}


def _imports(path: Path) -> list[tuple[int, str]]:
    """Every import as (level, module)."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
        elif isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
    return found


def test_contract_names_are_public() -> None:
    """The root exports the contract's names and nothing unlisted, and each of them exists."""
    assert sorted(ps.__all__) == sorted(CONTRACT + BESIDES)
    assert all(getattr(ps, name) is not None for name in ps.__all__)


def test_error_tree() -> None:
    """Every error is a PurestepError and a builtin that a stranger would catch."""
    pairs = {
        ps.ConfigError: ValueError,
        ps.ShapeError: ValueError,
        ps.RequestError: ValueError,
        ps.DtypeError: TypeError,
        ps.CheckpointError: RuntimeError,
        ps.CapacityError: RuntimeError,
        ps.RankError: RuntimeError,
        ps.StateBusyError: RuntimeError,
    }
    assert all(issubclass(error, ps.PurestepError) and issubclass(error, builtin) for error, builtin in pairs.items())


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_layers_import_leftwards(path: Path) -> None:
    """A layer imports only itself, the layers on its left, and the libraries it may use; ops sees no state class."""
    layer, *folders = path.relative_to(ROOT).parent.parts
    for level, module in _imports(path):
        first = module.split(".")[0]
        if level == 0:
            is_standard = first in sys.stdlib_module_names
            assert is_standard or first in THIRD_PARTY[layer], f"{path}: imports {module}"
            assert first != "purestep", f"{path}: imports inside the package are relative"
        elif level == 2 + len(folders):
            assert first in LAYERS[: LAYERS.index(layer) + 1], f"{path}: imports ..{module}"
            if layer == "ops":
                assert module in {"state.errors", "state.dims"}, f"{path}: ops imports ..{module}"
        else:
            assert level < 2 + len(folders), f"{path}: imports from above the package"


def test_folders_are_the_listed_packages() -> None:
    """The packages in pyproject are the folders with code, and the version is stated once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    folders = {"purestep"} | {
        "purestep." + ".".join(path.parent.relative_to(ROOT).parts)
        for layer in LAYERS
        for path in (ROOT / layer).rglob("__init__.py")
    }
    assert listed == folders


def test_root_has_nothing_else() -> None:
    """What git tracks at the root is what the layout names."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:  # an unpacked source tree
        return
    assert {line.split("/")[0] for line in tracked.stdout.split()} <= ROOT_ENTRIES


def test_one_copy_of_every_module() -> None:
    """No file of the package is loaded twice under two names, even after the tests have imported everything."""
    for path in SOURCES:
        name = ".".join(("purestep", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        importlib.import_module(name)
    seen: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).is_relative_to(PACKAGE) and not Path(file).is_relative_to(ROOT / "tests"):
            assert seen.setdefault(file, name) == name, f"{file} is loaded as {seen[file]} and {name}"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_modules_say_what_they_are(path: Path) -> None:
    """Every module has a docstring, and an __all__ unless it is a folder's __init__."""
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    assert path.name == "__init__.py" or re.search(r"^__all__", path.read_text(), re.M)


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_shape_tokens_parse(path: Path) -> None:
    """Shape tokens in docstrings use the dtypes and axis letters of state/dims.py."""
    for dtype, axes in re.findall(r"\b([a-z]+\d*)\[([A-Za-z0-9.,+*/() -]*)\]", path.read_text()):
        if dtype not in DTYPES:
            continue
        for axis in axes.split(","):
            # Numbers, and lower-case names of arguments, may stand beside the letters.
            assert set(re.sub(r"[0-9.+*/() -]|[a-z_]+", "", axis)) <= AXES, f"{path}: {dtype}[{axes}]"


@pytest.mark.parametrize("layer", LAYERS[:4])
def test_no_ambient_inputs(layer: str) -> None:
    """Below serving nothing reads a clock, the environment or a global generator."""
    for path in (ROOT / layer).rglob("*.py"):
        text = path.read_text()
        allowed = (
            {"os"}
            if layer in ("model", "step")
            else {"threading"}
            if path.name in ("handles.py", "graph.py")
            else set()
        )
        allowed |= {"datetime"} if path.name == "ranks.py" else set()  # how long to wait, as torch wants it
        allowed |= (
            {"time"} if path.name in ("compiled.py", "compiling.py") else set()
        )  # how long compiling took, for its report
        names = {module.split(".")[0] for level, module in _imports(path) if level == 0}
        assert not names & (AMBIENT - allowed), f"{path}: {names & AMBIENT}"
        assert "os.environ" not in text
        assert not re.search(r"torch\.(rand|randn|randint|randperm|multinomial|manual_seed)\(", text) or (
            "generator=" in text
        ), path
        assert not re.search(r"inference_mode\(\)", text), path


def test_host_reads_are_where_they_are_said_to_be() -> None:
    """Between the prepared batch and commit no Python reads a tensor on the host, but where rows go to experts."""
    watched = [
        *(ROOT / "ops").rglob("*.py"),
        *(
            ROOT / "model" / name
            for name in ("ascend.py", "attention.py", "forward.py", "layer.py", "paged.py", "reading.py", "sequence.py")
        ),
        *(ROOT / "step" / name for name in ("decode.py", "graphs.py", "relay.py", "sample.py")),
    ]
    found = set()
    for path in watched:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in HOST_READS:
                found.add(f"{path.parent.name}/{path.name}")
    assert found <= {"ops/blocks.py", "ops/experts.py", "ops/expert_ranks.py", "ops/fused.py"}


def test_value_classes_are_frozen_and_keyword_only() -> None:
    """Every value class is frozen, compares by identity and survives flatten and unflatten."""
    from torch.utils import _pytree as pytree

    for name in ("DecodeState", "ForwardBatch", "KVState", "MHCState", "StepOutput"):
        cls = getattr(ps, name)
        assert attrs.has(cls)
        assert cls.__eq__ is object.__eq__
        assert all(field.kw_only for field in attrs.fields(cls))
        assert cls in pytree.SUPPORTED_NODES


def test_modules_import_alone_without_warnings() -> None:
    """The package imports in a fresh interpreter with warnings as errors, without optional dependencies."""
    code = (
        "import sys, importlib.abc\n"
        "class Refuse(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'hypothesis', 'torch_npu', 'transformers', 'aiohttp'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import purestep\n"
        "assert purestep.decode_step\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
