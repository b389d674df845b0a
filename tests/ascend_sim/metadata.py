"""Scheduling metadata: a buffer that is only good for the lengths and options it was made for.

The real buffer splits the work over cores. Ours holds a hash of what that split depends on, so that a stale buffer is
an error instead of a wrong result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from ascend_sim.rules import Site
from torch import Tensor

__all__ = ["SIZE", "check_metadata", "make_metadata"]

SIZE = 1024


def make_metadata(kind: str, facts: Mapping[str, object]) -> Tensor:
    """Hash what a kernel's work split depends on into its buffer: i32[1024]."""
    described = ";".join(f"{name}={_plain(facts[name])}" for name in sorted(facts))
    digest = hashlib.shake_128(f"{kind};{described}".encode()).digest(4 * SIZE)
    return torch.frombuffer(bytearray(digest), dtype=torch.int32)


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else value


def check_metadata(site: Site, metadata: Tensor | None, kind: str, facts: Mapping[str, object]) -> None:
    """Require the buffer that belongs to the lengths and options of this call."""
    metadata = site.tensor("metadata", metadata, torch.int32, (SIZE,))
    fresh = torch.equal(metadata, make_metadata(kind, facts))
    described = {name: _plain(value) for name, value in facts.items()}
    site.require(fresh, f"metadata made for this call: {described}", "metadata of other lengths or options")
