"""Random weights of any model in any of the forms that releases have, without quantising anything.

Source: none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from math import log2
from typing import Final

import attrs
import torch
from torch import Tensor

from ..ops.formats import E8M0, Fp4Weight, Fp8Weight, StoredWeight
from ..state.config import Config
from .initial import draw_table
from .layout import Piece
from .storage import TYPES, Form, Storage, scale_shape

__all__ = ["RandomSource"]

_FP4_RMS: Final = (8.5625) ** 0.5
"""Root mean square of the codes of FP4."""

_FP8_RMS: Final = 100.0
"""Root mean square that codes of FP8 are drawn with; the largest of 256 is below 448."""

_SIZES: Final = {"base": 0.5, "bias": 0.3}
"""Deviations of what is added somewhere; the others have one."""


@attrs.frozen(eq=False, kw_only=True)
class RandomSource:
    """Random weights of any model, so large that every part matters to the logits.

    Each tensor depends on the seed and its name alone. Stored ones are drawn as codes: FP4 with all codes equally
    likely, FP8 as a normal distribution has them.

    Attributes:
        config: the model's numbers.
        has_draft: whether to draw a draft block too.
        storage: the forms to draw.
        seed: of all draws.
    """

    config: Config
    has_draft: bool
    storage: Storage
    seed: int

    def weights(self, pieces: Sequence[Piece]) -> Iterator[Tensor | StoredWeight]:
        """Draw weights; see ``WeightSource``."""
        for piece in pieces:
            digest = hashlib.sha256(f"{self.seed} {piece.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            form = self.storage.form(piece.kind)
            if piece.kind == "ids":
                yield draw_table(piece.shape, self.config.n_routed_experts, generator)
            elif form == "wide":
                yield _draw_floats(piece, generator)
            else:
                yield _draw_codes(piece, form, self.storage, generator)

    def identity(self) -> str:
        """Name the weights by their seed."""
        return f"random {self.seed}"


def _draw_floats(piece: Piece, generator: torch.Generator) -> Tensor:
    noise = torch.randn(piece.shape, generator=generator)
    field = piece.leaf.rsplit(".", 1)[-1]
    if piece.kind == "norm" or field == "scale":
        return 1 + 0.2 * noise
    if field == "fn" or (piece.kind != "f32" and field != "embed"):
        return noise * _gain(field) * piece.shape[-1] ** -0.5
    return noise * _SIZES.get(field, 1.0)


def _gain(field: str) -> float:
    return 2.0 if field in ("head", "w2", "shared_w2") else 1.0


def _draw_codes(piece: Piece, form: Form, storage: Storage, generator: torch.Generator) -> StoredWeight:
    rows, columns = piece.shape
    size = _gain(piece.leaf.rsplit(".", 1)[-1]) * columns**-0.5
    scale = round(log2(size / (_FP4_RMS if form == "fp4" else _FP8_RMS)))
    scales = torch.randint(scale, scale + 2, scale_shape(piece.shape, form), generator=generator).float().exp2()
    if form == "fp4":
        codes = torch.empty((rows, columns // 2), dtype=torch.uint8).random_(generator=generator)
        return Fp4Weight(codes, scales.to(E8M0))
    drawn = torch.empty((rows, columns), dtype=torch.uint8).random_(generator=generator)
    codes = _fp8_quantiles().view(torch.uint8)[drawn.int()].view(torch.float8_e4m3fn)
    return Fp8Weight(codes, scales.to(TYPES[storage.scales]).unsqueeze(0))


def _fp8_quantiles() -> Tensor:
    """List 256 equally likely codes of a normal distribution."""
    share = (torch.arange(256, dtype=torch.float64) + 0.5) / 256
    return (torch.special.ndtri(share) * _FP8_RMS).float().to(torch.float8_e4m3fn)
