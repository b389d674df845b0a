"""Cases from the field about providers, simulator and self-test, by their number in the collection of such cases."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from ascend_sim.simulator import simulate
from kit.ascend import pair_on_machine
from purestep.model.paged import layer_rows, write_rows
from purestep.ops.ascend.providers import BINDINGS, Operator, Providers, choose_providers, installed_schemas
from purestep.serving.kernel_report import CHECKS, run_checks
from purestep.serving.kernel_table import kernel_rows
from purestep.state.batch import AttentionMetadata
from purestep.state.capacity import PoolSizes
from purestep.state.kv import KVLayout
from purestep.step.selfcheck import check_output
from torch import Tensor

CPU = torch.device("cpu")
PACKAGE = Path(ps.__file__).parent
KERNELS = sorted(
    {b.qualified_name for b in BINDINGS if b.provider in ("cann-recipes", "torch-npu") and "a3" in b.chips}
)


@pytest.mark.parametrize("name", KERNELS)
def test_an_operator_that_a_build_lacks(name: str) -> None:
    """ASC-03: it falls back by name, the table says whose it is, no check runs it, and strict lists it at the start."""
    with simulate(without=[name]):
        installed = installed_schemas()
        providers = choose_providers("a3", installed)
        with pytest.raises(ps.ConfigError) as caught:
            choose_providers("a3", installed, strict=True)
        rows = {row.operator: row for row in kernel_rows("a3", installed)}
    assert providers.missing
    for operator in providers.missing:
        assert not providers.has(operator)
        assert operator in str(caught.value)
        assert rows[operator].status.startswith("falls back: the kernel is in ")
    lost = {b.operator for b in BINDINGS if b.qualified_name == name and "a3" in b.chips}
    assert lost <= set(providers.missing)


@attrs.frozen(eq=False, kw_only=True)
class Changed(Operator):
    """An operator whose arguments are changed on the way, or whose result is."""

    before: Callable[[Any], Any] = attrs.field(default=lambda value: value)
    after: Callable[[Any], Any] = attrs.field(default=lambda value: value)

    def __call__(self, **given: Any) -> Any:
        """Call the operator between the changes."""
        return self.after(Operator.__call__(self, **{name: self.before(value) for name, value in given.items()}))


def changed(providers: Providers, operator: str, **changes: Callable[[Any], Any]) -> Providers:
    """Put a changed operator in its place."""
    one = providers[operator]
    other = Changed(binding=one.binding, schema=one.schema, positional=one.positional, **changes)
    return attrs.evolve(providers, operators={**providers.operators, operator: other})


def strided(value: Any) -> Any:
    """Give tensors of more than one element another layout with the same values."""
    if isinstance(value, list):
        return [strided(one) for one in value]
    if not isinstance(value, Tensor) or value.numel() < 2:
        return value
    wide = torch.empty(*value.shape, 2, dtype=value.dtype)
    wide[..., 0] = value
    return wide[..., 0]


CHECKED: Mapping[str, tuple[str, ...]] = {
    chip: tuple(dict.fromkeys(check.operator for check in CHECKS if chip in check.chips)) for chip in ("a3", "a5")
}


@pytest.mark.parametrize(("chip", "operator"), [(chip, name) for chip, names in CHECKED.items() for name in names])
def test_a_layout_is_refused_or_does_not_matter(chip: str, operator: str) -> None:
    """ASC-05: strided inputs are either refused by that rule or give what dense ones give."""
    checks = [check for check in CHECKS if check.operator == operator]
    with simulate(chip=chip):
        providers = choose_providers(chip, installed_schemas())
        if not providers.has(operator):
            assert operator == "activate"  # plain on the A5
            return
        found = run_checks(changed(providers, operator, before=strided), CPU, checks)
    for one in found:
        assert one.verdict in ("passes", "not run") or "contiguous" in one.detail, one


@pytest.mark.parametrize("page", [29077, 1 << 20])
def test_addresses_far_out_in_a_cache(page: int) -> None:
    """ASC-01: rows of the last of 61 layers lie where unbounded integers put them, in elements and in bytes."""
    sizes = PoolSizes(page_size=128, requests=2, context=256, pages=page, swa_pages=page, c128_pages=page)
    layers, width = 61, 577
    layout = KVLayout(sizes=sizes, kinds=(0,) * layers, places=tuple(range(layers)), form="ascend")
    buffer = torch.empty(layers * layout.n_slots("swa"), width, dtype=torch.bfloat16, device="meta")
    rows = layer_rows({"swa": buffer}, layout)[-1]["swa"]
    first = (layers - 1) * (page + 1) * 128
    assert rows.storage_offset() == first * width
    blocks = rows.view(-1, 128, 1, width)
    assert blocks.stride(0) * blocks.itemsize == 128 * width * 2
    assert blocks[page].storage_offset() == (first + page * 128) * width > 2**31
    metadata = AttentionMetadata(swa_loc=torch.tensor([page * 128 + 5]), compressors={}, singles=None, chunks=())
    written = write_rows(layout, metadata, range(layers))["swa"]
    assert written.tolist() == [layer * (page + 1) * 128 + page * 128 + 5 for layer in range(layers)]


@pytest.mark.parametrize("broken", ["rms_norm", "update_streams"])
def test_a_kernel_that_answers_everything_alike(broken: str) -> None:
    """BAT-09: kernels that make every position equal, or no number, are found by the check at start-up."""
    with pair_on_machine((0, 128)) as pair:
        model = pair.kernels
        check_output(model)
        for value in (0.0, torch.nan):
            run = getattr(model.ops, broken)
            ops = attrs.evolve(model.ops, **{broken: lambda *args, run=run: torch.full_like(run(*args), value)})
            with pytest.raises(ps.CheckpointError, match="logits"):
                check_output(attrs.evolve(model, ops=ops))


MATERIAL = [
    *(("a3", name) for name in ("project_groups", "grouped_matmul", "quantised_linear", "attend", "compress")),
    *(("a5", name) for name in ("project_groups", "grouped_matmul", "attend", "compress", "pick_entries")),
]


@pytest.mark.parametrize(("chip", "operator"), MATERIAL)
def test_an_inaccurate_kernel_is_told_from_a_right_one(chip: str, operator: str) -> None:
    """ASC-09: results that are off by a twentieth fail the operator's stated tolerance; right ones pass."""

    def blurred(result: Any) -> Any:
        if isinstance(result, (list, tuple)):
            return [blurred(one) if one.numel() else one for one in result]
        signs = torch.arange(result.numel()).view(result.shape) % 2 * 2 - 1
        return result + (result.abs().amax() / 20 * signs).to(result.dtype)

    checks = [check for check in CHECKS if check.operator == operator and chip in check.chips]
    with simulate(chip=chip):
        providers = choose_providers(chip, installed_schemas())
        good = run_checks(providers, CPU, checks)
        bad = run_checks(changed(providers, operator, after=blurred), CPU, checks)
    assert {one.verdict for one in good if one.operator == operator} == {"passes"}
    assert {one.verdict for one in bad if one.operator == operator} == {"fails"}


def test_every_module_imports_beside_a_broken_package(tmp_path: Path) -> None:
    """ASC-11: no module imports a kernel package, even where one lies around; asking for kernels is an error."""
    for module in ("torch_npu", "custom_ops", "sgl_kernel_npu"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('imported')\n")
    names = [
        ".".join(("purestep", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for layer in ("state", "ops", "model", "step", "serving")
        for path in sorted((PACKAGE / layer).rglob("*.py"))
    ]
    code = (
        f"import sys; sys.path[:0] = {[str(tmp_path), *sys.path]!r}\n"
        f"import importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        "from purestep.ops.ascend.providers import choose_providers, installed_schemas\n"
        "try: choose_providers('a3', installed_schemas())\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("kernels: no Ascend operators are registered; install")
