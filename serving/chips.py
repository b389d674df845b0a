"""What a rank of a plan runs on: published peak figures, of which a step reaches a part.

A rank of an Ascend 910C is one of its two dies: that is what torch-npu calls a device.

Source: "Serving Large Language Models on Huawei CloudMatrix384", arXiv:2506.12708, section 3 (910C: 752 TFLOPS in
bfloat16, 128 GB, 3.2 TB/s and 392 GB/s each way per package, halved here); NVIDIA's data sheets of H100 SXM and H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

__all__ = ["CHIPS", "Chip"]


@attrs.frozen(kw_only=True)
class Chip:
    """Peak figures of one rank.

    Attributes:
        flops: bfloat16 floating-point operations a second, dense.
        memory: bytes.
        bandwidth: bytes a second between memory and cores.
        link: bytes a second to other ranks, one way.
    """

    flops: float
    memory: int
    bandwidth: float
    link: float


CHIPS: Final[Mapping[str, Chip]] = {
    "910c": Chip(flops=376e12, memory=64 * 10**9, bandwidth=1.6e12, link=196e9),
    "h100": Chip(flops=989e12, memory=80 * 10**9, bandwidth=3.35e12, link=450e9),
    "h200": Chip(flops=989e12, memory=141 * 10**9, bandwidth=4.8e12, link=450e9),
}
"""Figures by name."""
