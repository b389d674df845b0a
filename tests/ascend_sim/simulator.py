"""A strict simulator of the Ascend operators on a CPU.

Usage::

    with simulate(chip="a3", heads=4, strict_sizes=False) as machine, machine.recorder() as seen:
        torch.ops.custom.npu_hc_post(x, residual, post, comb)
    assert seen.names() == ["custom::npu_hc_post"]

Inside the block the recorded schemas (``purestep/ops/ascend/schemas.json``) are registered under their real names, with
plain-torch mathematics written from the kernels' documentation and nothing of ``purestep.ops``. A call that a real
kernel would refuse, misread or answer with garbage raises ``SimulatorError`` with operator, rule and what was given:
dtype, rank, contiguity, table widths, block sizes, empty tensors, negative slots, cumulative lengths, head counts.
Beyond that

- what a kernel leaves undefined is NaN (the tail of the compressor's rows, second results that nobody may use);
- what is written to slot 0, the dummy, turns to NaN (``poison_dummy``), so that a later read of it shows;
- scheduling metadata holds a hash of the lengths and options it was made for; another call with it is refused;
- roundings are the documented ones: HF32 factors in ``npu_hc_pre``, int8 and fp8 with their scales;
- operators that look right and are not (``unusable`` in the schemas) exist and refuse.

``heads=64`` takes exactly 64 query heads as documented; another number takes its multiples, so that small models run.
``strict_sizes=False`` lets other widths pass than those the kernels are documented for; nothing else is relaxed.
``providers`` says which packages are installed, ``torch_npu`` in which release, ``without`` which operators their
build lacks, ``instead`` which schemas differ from the recorded ones.

What a simulator cannot tell: accumulation order, alignment, tiling caches, buffer sizes, capture order, speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from ascend_sim import (
    activation,
    attention,
    blocks,
    compressor,
    gating,
    grouped,
    indexer,
    packed,
    products,
    ranks,
    routing,
    rows,
    sampling,
    streams,
)
from ascend_sim.recorder import Recorder
from ascend_sim.rules import Kernel, Rules, Site
from purestep.ops.ascend.schemas import RecordedSchema, load_schemas, parse_text
from torch import Tensor
from torch.library import Library

__all__ = ["PACKAGES", "Machine", "simulate"]

PACKAGES = ("torch-npu", "cann-recipes", "sgl-kernel-npu")
"""What production on the A3 has installed."""

_MODULES = (
    *(activation, attention, blocks, compressor, gating, grouped, indexer, packed, products, ranks, routing, rows),
    *(sampling, streams),
)
_KERNELS: Mapping[str, Kernel] = {name: kernel for module in _MODULES for name, kernel in module.KERNELS.items()}
_REFUSED = Kernel(run=rows.refuse, empty=True)


@attrs.frozen(eq=False, kw_only=True)
class Machine:
    """A simulated machine.

    Attributes:
        rules: what it is like.
        schemas: qualified name -> the schema that is registered.
    """

    rules: Rules
    schemas: Mapping[str, str]

    def recorder(self) -> Recorder:
        """Make a recorder of the calls to the simulated operators; enter it around what is to be recorded."""
        return Recorder({name.split("::")[0] for name in self.schemas})


@contextlib.contextmanager
def simulate(
    *,
    chip: str = "a3",
    providers: Sequence[str] = PACKAGES,
    torch_npu: str = "2.13.0",
    heads: int = 64,
    strict_sizes: bool = True,
    poison_dummy: bool = True,
    rope_width: int = 64,
    without: Sequence[str] = (),
    instead: Mapping[str, str] | None = None,
    groups: Mapping[str, Any] | None = None,
) -> Iterator[Machine]:
    """Register the operators of some packages on the CPU for the length of the block.

    Args:
        chip: "a2", "a3" or "a5".
        providers: packages that are installed.
        torch_npu: release of torch-npu.
        heads: 64 as documented, or another number whose multiples are taken.
        strict_sizes: whether widths must be documented ones.
        poison_dummy: whether slot 0 turns to NaN when it is written.
        rope_width: rotary channels of a packed key/value row (A5).
        without: qualified names of operators that are not there.
        instead: qualified name -> another schema than the recorded one.
        groups: communicator name -> ``ranks.Group`` of simulated expert-parallel ranks.
    Yields:
        The machine.
    """
    rules = Rules(
        chip=chip,
        heads=heads,
        strict_sizes=strict_sizes,
        poison_dummy=poison_dummy,
        rope_width=rope_width,
        ranks=dict(groups or {}),
    )
    texts = {
        s.qualified_name: (s, s.text) for s in _installed(chip, providers, torch_npu) if s.qualified_name not in without
    }
    for name, text in (instead or {}).items():
        texts[name] = (texts[name][0], text)
    with contextlib.ExitStack() as stack:
        libraries: dict[str, Library] = {}
        for record, text in texts.values():
            if record.namespace not in libraries:
                libraries[record.namespace] = stack.enter_context(
                    torch.library._scoped_library(record.namespace, "FRAGMENT")
                )
            _register(libraries[record.namespace], record, text, rules)
        yield Machine(rules=rules, schemas={name: text for name, (_, text) in texts.items()})


def _installed(chip: str, providers: Sequence[str], torch_npu: str) -> list[RecordedSchema]:
    """Choose the records of one machine: its chip, its packages, its release of torch-npu."""
    return [
        record
        for record in load_schemas()
        if record.provider in providers
        and (record.provider != "torch-npu" or torch_npu in record.releases)
        and (chip in record.chips or record.provider == "torch-npu")
    ]


def _register(library: Library, record: RecordedSchema, text: str, rules: Rules) -> None:
    name = text.split("::", 1)[1].split("(", 1)[0]
    if hasattr(getattr(torch.ops, record.namespace), name):
        raise RuntimeError(f"{record.qualified_name} exists already: leave the other simulation first")
    library.define(text.split("::", 1)[1])
    is_missing = rules.chip not in record.chips or record.qualified_name not in _KERNELS
    kernel = _REFUSED if record.unusable or is_missing else _KERNELS[record.qualified_name]
    arguments = parse_text(text).arguments
    site = Site(operator=record.qualified_name, rules=rules)

    def run(*args: Any, **kwargs: Any) -> Any:
        named = _named(arguments, args, kwargs)
        _check_layout(site, kernel, named)
        return kernel.run(site, **named)

    library.impl(name, run, "CPU")
    if kernel.fake is not None:
        fake = kernel.fake
        torch.library.register_fake(
            f"{record.namespace}::{name}",
            lambda *args, **kwargs: fake(site, **_named(arguments, args, kwargs)),
            lib=library,
        )


def _named(arguments: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Give every argument of the schema its name, and defaults to those left out."""
    named = {a.name: a.default_value for a in arguments if a.has_default_value()}
    named |= {a.name: value for a, value in zip(arguments, args, strict=False)}
    return named | dict(kwargs)


def _check_layout(site: Site, kernel: Kernel, named: Mapping[str, Any]) -> None:
    """Require contiguous tensors with elements, wherever the kernel does not say otherwise."""
    for name, value in named.items():
        for x in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(x, Tensor):
                site.require(kernel.empty or x.numel() > 0, f"{name} with rows: no empty tensors", tuple(x.shape))
                site.require(name in kernel.strided or x.is_contiguous(), f"{name} contiguous", x.stride())
