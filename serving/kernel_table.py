"""Which kernel packages this machine has, and what they run of each operator."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Final

import attrs

from ..ops.ascend.providers import BINDINGS, MODULES, Binding, Providers, choose_providers
from ..ops.ascend.schemas import RecordedSchema, load_schemas, same_contract
from ..state.errors import ConfigError

__all__ = ["KernelRow", "Package", "kernel_rows", "load_packages", "usable_providers"]

_DISTRIBUTIONS: Final[Mapping[str, str]] = {
    "torch-npu": "torch-npu",
    "cann-recipes": "custom-ops",
    "sgl-kernel-npu": "sgl-kernel-npu",
    "vllm-ascend": "vllm-ascend",
}


@attrs.frozen(eq=False, kw_only=True)
class Package:
    """A package that registers Ascend operators.

    Attributes:
        name: of the package.
        version: that is installed; empty where none is, or none is known.
        problem: why its operators are not there; empty where they are.
    """

    name: str
    version: str
    problem: str


@attrs.frozen(eq=False, kw_only=True)
class KernelRow:
    """What runs one operator on one chip.

    Attributes:
        operator: logical name.
        provider: package of the kernel, or "torch" for the plain function.
        kernel: qualified name of the kernel, empty for a plain function.
        chip: that was asked about.
        schema: "same" or "differs" from the recorded one; empty without a kernel.
        status: in words.
    """

    operator: str
    provider: str
    kernel: str
    chip: str
    schema: str
    status: str


def load_packages() -> tuple[Package, ...]:
    """Import the kernel packages that are installed; what one of them complains about is kept, not raised."""
    return tuple(_load(name, module) for name, module in MODULES.items())


def _load(name: str, module: str) -> Package:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return Package(name=name, version="", problem="not installed")
    try:
        version = importlib.metadata.version(_DISTRIBUTIONS[name])
    except importlib.metadata.PackageNotFoundError:
        version = ""
    try:
        importlib.import_module(module)
    except Exception as error:
        return Package(name=name, version=version, problem=f"{type(error).__name__}: {error}")
    return Package(name=name, version=version, problem="")


def kernel_rows(chip: str, installed: Mapping[str, str]) -> tuple[KernelRow, ...]:
    """Say for every operator what runs it.

    Args:
        chip: "a2", "a3" or "a5".
        installed: live schemas, as from ``installed_schemas``.
    Raises:
        ConfigError: unknown chip.
    """
    providers = usable_providers(chip, installed)
    recorded = load_schemas()
    return tuple(_row(operator, chip, installed, providers, recorded) for operator in _operators())


def usable_providers(chip: str, installed: Mapping[str, str]) -> Providers | None:
    """Choose among the operators whose live schema is the recorded one; None where there are none at all.

    Raises:
        ConfigError: unknown chip.
    """
    recorded = load_schemas()
    good = {name: text for name, text in installed.items() if _matches(name, text, recorded)}
    try:
        return choose_providers(chip, good)
    except ConfigError as error:
        if error.field == "kernels":
            return None
        raise


def _operators() -> tuple[str, ...]:
    return tuple(dict.fromkeys(binding.operator for binding in BINDINGS))


def _matches(name: str, live: str, recorded: tuple[RecordedSchema, ...]) -> bool:
    return any(same_contract(r.text, live) for r in recorded if r.qualified_name == name)


def _row(
    operator: str,
    chip: str,
    installed: Mapping[str, str],
    providers: Providers | None,
    recorded: tuple[RecordedSchema, ...],
) -> KernelRow:
    candidates = [b for b in BINDINGS if b.operator == operator and chip in b.chips]
    chosen = None if providers is None else providers[operator].binding
    other = next((b for b in candidates if _differs(b, installed, recorded)), None)
    if other is not None and (chosen is None or chosen.qualified_name != other.qualified_name):
        status = "refused: install a release with the recorded schema"
        return _made(other, chip, schema="differs", status=status)
    if chosen is not None and chosen.name:
        return _made(chosen, chip, schema="same", status=_and_note("kernel runs", chosen.note))
    kernels = [b for b in candidates if b.name]
    if kernels and candidates[0].name:
        where = " or ".join(dict.fromkeys(b.provider for b in kernels))
        return _plain_row(operator, chip, f"falls back: the kernel is in {where}")
    note = candidates[0].note if candidates else "this chip needs no operator for it"
    return _plain_row(operator, chip, f"plain function: {note}")


def _differs(binding: Binding, installed: Mapping[str, str], recorded: tuple[RecordedSchema, ...]) -> bool:
    live = installed.get(binding.qualified_name) if binding.name else None
    return live is not None and not _matches(binding.qualified_name, live, recorded)


def _and_note(text: str, note: str) -> str:
    return f"{text}; {note}" if note else text


def _made(binding: Binding, chip: str, *, schema: str, status: str) -> KernelRow:
    return KernelRow(
        operator=binding.operator,
        provider=binding.provider,
        kernel=binding.qualified_name,
        chip=chip,
        schema=schema,
        status=status,
    )


def _plain_row(operator: str, chip: str, status: str) -> KernelRow:
    return KernelRow(operator=operator, provider="torch", kernel="", chip=chip, schema="", status=status)
