"""The model as one value: numbers, weights, numeric choices and the kernel table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from ..ops.dispatch import Ops
from ..state.config import Config
from ..state.kv import CacheForm
from ..state.numerics import Numerics
from .params import Params
from .ranks import Ranks
from .rotary import layer_frequencies

__all__ = ["Model"]


@attrs.frozen(eq=False, kw_only=True)
class Model:
    """A loaded DeepSeek-V4 model.

    Attributes:
        config: the numbers of ``config.json``.
        params: the weights, a pytree; ``attrs.evolve(model, params=...)`` swaps them.
        numerics: rounding choices.
        ops: the kernel table, chosen once.
        dtype: of activations and caches.
        ranks: this process's place in a layout; what ``params`` holds is this rank's part of the weights.
        fingerprint: of the whole model, where ``params`` is a part of it; else None, and it follows from ``params``.
        tokenizer: a ``tokenizers.Tokenizer``, or None where the checkpoint has none.
        frequencies: compress ratio -> f32[R/2], rotary frequencies of that layer kind; follows from ``config``.
    """

    config: Config
    params: Params
    numerics: Numerics
    ops: Ops
    dtype: torch.dtype
    ranks: Ranks = attrs.field(factory=Ranks)
    fingerprint: str | None = None
    tokenizer: Any = None
    frequencies: Mapping[int, Tensor] = attrs.field(init=False)

    @frequencies.default
    def _frequencies(self) -> Mapping[int, Tensor]:
        ratios = set(self.config.compress_ratios)
        return {ratio: layer_frequencies(self.config, ratio).to(self.device) for ratio in ratios}

    @property
    def cache_form(self) -> CacheForm:
        """What caches the kernels read."""
        return "plain" if self.ops.paged is None else "ascend"

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.params.embed.device
