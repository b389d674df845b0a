"""The model as one value: numbers, weights, numeric choices and the kernel table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from ..ops.dispatch import Ops
from ..state.config import Config
from ..state.errors import ConfigError
from ..state.kv import CacheForm
from ..state.numerics import Numerics
from .leaves import has_stored
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
        frequencies: compress ratio -> f32[R/2], rotary frequencies of that layer kind; they follow from the others.
        rounds_activations: whether rows that meet quantised weights are rounded; follows from the others.
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
        yarn = self.numerics.window_yarn
        return {ratio: layer_frequencies(self.config, ratio, window_yarn=yarn).to(self.device) for ratio in ratios}

    @property
    def key_dtype(self) -> torch.dtype:
        """Dtype of index queries and keys: f32 where each has a scale of its own, which narrower ones cannot hold."""
        return torch.float32 if self.numerics.indexer_qdq in ("fp8", "int8") else self.dtype

    @property
    def turn_dtype(self) -> torch.dtype:
        """What cosines and sines are rounded to."""
        return self.dtype if self.numerics.rotary_rounding else torch.float32

    rounds_activations: bool = attrs.field(init=False)

    @rounds_activations.default
    def _rounds_activations(self) -> bool:
        return self.numerics.rounds_activations(is_stored=has_stored(self.params))

    @property
    def cache_form(self) -> CacheForm:
        """How caches are stored unless another form is asked for."""
        return "plain" if self.ops.paged is None else self.ops.paged.form

    def require_form(self, form: CacheForm) -> None:
        """Refuse a form of caches that the kernels do not read, or that cannot hold what the numerics round to.

        Raises:
            ConfigError: naming the forms that fit.
        """
        if form not in self.cache_forms:
            raise ConfigError(
                f"caches: expected the form {' or '.join(self.cache_forms)}, which these kernels and numerics have, "
                f'got {form!r}; FP8 rows hold what kv_qdq rounds, FP8 keys what indexer_qdq="fp8" and FP4 keys what '
                'indexer_qdq=True rounds, online pooling all but pooling_rounding="all"; see init_state(caches=)',
                field="caches",
                expected=self.cache_forms,
                got=form,
            )

    @property
    def cache_forms(self) -> tuple[CacheForm, ...]:
        """The forms of caches that hold exactly what the model computes."""
        if self.ops.paged is not None:
            return (self.ops.paged.form,)
        fits: list[CacheForm] = ["plain"]
        if self.numerics.kv_qdq and self.numerics.indexer_qdq in (True, "fp8") and self.config.index_head_dim % 2 == 0:
            fits.append("fp4" if self.numerics.indexer_qdq is True else "fp8")
        online: dict[CacheForm, CacheForm] = {"plain": "online", "fp8": "fp8-online", "fp4": "fp4-online"}
        if self.numerics.pooling_rounding != "all":
            fits += [online[form] for form in fits]
        return tuple(fits)

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.params.embed.device
