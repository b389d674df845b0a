"""The numeric choices in which implementations of DeepSeek-V4 differ, as one frozen value.

Source: model sheet, sections 2.12 (rounding points) and 3 (where implementations disagree).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

import attrs

from .errors import ConfigError

__all__ = ["Numerics"]


def _one_of(*choices: bool | str) -> Any:
    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
            raise ConfigError(
                f"Numerics.{attribute.name}: expected one of {', '.join(map(repr, choices))}, got {value!r}",
                field=attribute.name,
                expected=choices,
                got=value,
            )

    return check


def _not_negative(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(
            f"Numerics.{attribute.name}: expected a number from 0 up and below 1, got {value!r}",
            field=attribute.name,
            expected="0 <= number < 1",
            got=value,
        )


_SWITCH: Final = _one_of(False, True)


@attrs.frozen(kw_only=True)
class Numerics:
    """Named rounding and policy switches; a model is loaded with exactly one of these.

    Every switch is a fact about published implementations, not a tuning knob: two models that differ only here are two
    different functions. Each row of the sheet's table of disagreements has one field, but for three that change no
    number: how picks are padded where there are fewer entries than ``index_topk``, how work is split over ranks, and
    the draft block, which is not run. ``expert_rounding`` is a difference found beside that table.

    "The dtype" below is the model's own, that of its activations. In float32 the switches that round to it do nothing.

    Attributes:
        kv_qdq: round the non-rotary part of window and compressed entries through e4m3 in groups of 64, as an FP8 cache
            does: True from values in the dtype, "wide" from the float32 values before them.
        indexer_hadamard: rotate index queries and keys by a Walsh-Hadamard matrix.
        indexer_qdq: round index queries and keys: True through e2m1 in groups of 32, "fp8" through e4m3 by row, "int8"
            through int8 by row.
        index_score_rounding: index dot products, head weights, relu and head sum in the dtype instead of f32.
        query_norm_rounding: per-head query norm: True with every step rounded to the dtype, "factor" with the factor
            alone rounded before the product; False with one rounding at the end.
        probability_rounding: attention probabilities rounded before they meet the values: True unnormalised,
            "normalised" after the division, with scores in the dtype too; False not at all.
        clamp_shared_expert: apply ``swiglu_limit`` to the shared expert as well (the first official upload did not).
        int8_weights: round linear and expert weights to int8 by output channel, and the rows that meet them to int8 by
            row (W8A8); with Ascend kernels only.
        invariant: compute every row in an order that does not depend on which rows or chunks it came with, so that
            results are equal bit for bit over batch, row place and chunking.
        entry_norm_rounding: round window and compressed entries to the dtype between their norm and their rotation.
        rotary_rounding: round cosines and sines to the dtype.
        window_yarn: stretch the rotation of window-only layers by YaRN as well.
        pooling_rounding: "entry" rounds a pooled group to the dtype before its norm, "all" its projections, softmax
            weights and products too, "none" nothing.
        router_rounding: router logits and scores in the dtype instead of f32.
        router_epsilon: added to the sum that normalises the routing weights.
        routing_weight: where routing weights and their factor are applied: "inside" the expert before its down
            projection, "after" it, or "summed": the weights after it and the factor to the sum of the experts.
        expert_rounding: every step of the SwiGLU, every weighted expert and their sum rounded to the dtype.
        stream_rounding: mix the residual streams in the dtype, with rounded weights, instead of in f32.
        activation_qdq: round the rows that meet weights which releases quantise through e4m3 in groups of 128: True
            always, "stored" where the model keeps its weights quantised.
        wo_a_qdq: the same for the grouped output projection.
        head_rounding: logits computed in the dtype.
    """

    kv_qdq: bool | Literal["wide"] = attrs.field(default=False, validator=_one_of(False, True, "wide"))
    indexer_hadamard: bool = attrs.field(default=False, validator=_SWITCH)
    indexer_qdq: bool | Literal["fp8", "int8"] = attrs.field(
        default=False, validator=_one_of(False, True, "fp8", "int8")
    )
    index_score_rounding: bool = attrs.field(default=False, validator=_SWITCH)
    query_norm_rounding: bool | Literal["factor"] = attrs.field(default=False, validator=_one_of(False, True, "factor"))
    probability_rounding: bool | Literal["normalised"] = attrs.field(
        default=False, validator=_one_of(False, True, "normalised")
    )
    clamp_shared_expert: bool = attrs.field(default=True, validator=_SWITCH)
    int8_weights: bool = attrs.field(default=False, validator=_SWITCH)
    invariant: bool = attrs.field(default=False, validator=_SWITCH)
    entry_norm_rounding: bool = attrs.field(default=True, validator=_SWITCH)
    rotary_rounding: bool = attrs.field(default=False, validator=_SWITCH)
    window_yarn: bool = attrs.field(default=False, validator=_SWITCH)
    pooling_rounding: Literal["none", "entry", "all"] = attrs.field(
        default="entry", validator=_one_of("none", "entry", "all")
    )
    router_rounding: bool = attrs.field(default=False, validator=_SWITCH)
    router_epsilon: float = attrs.field(default=0.0, validator=_not_negative)
    routing_weight: Literal["inside", "after", "summed"] = attrs.field(
        default="inside", validator=_one_of("inside", "after", "summed")
    )
    expert_rounding: bool = attrs.field(default=False, validator=_SWITCH)
    stream_rounding: bool = attrs.field(default=False, validator=_SWITCH)
    activation_qdq: bool | Literal["stored"] = attrs.field(default=False, validator=_one_of(False, True, "stored"))
    wo_a_qdq: bool = attrs.field(default=False, validator=_SWITCH)
    head_rounding: bool = attrs.field(default=False, validator=_SWITCH)

    def rounds_activations(self, *, is_stored: bool) -> bool:
        """Tell whether rows that meet quantised weights are rounded, where a model keeps its weights so or does not."""
        return self.activation_qdq is True or (self.activation_qdq == "stored" and is_stored)

    @classmethod
    def named(cls, name: str) -> Numerics:
        """Return the choices of an implementation by its name.

        Args:
            name: plain, official, transformers, sglang, vllm-ascend or vllm-ascend-newest.
        Raises:
            ConfigError: another name.
        """
        known: dict[str, Callable[[], Numerics]] = {
            "plain": cls.plain,
            "official": cls.official,
            "transformers": cls.transformers,
            "sglang": cls.sglang,
            "vllm-ascend": cls.vllm_ascend,
            "vllm-ascend-newest": partial(cls.vllm_ascend, newest=True),
        }
        if name not in known:
            raise ConfigError(
                f"numerics: expected one of {', '.join(known)}, got {name!r}",
                field="numerics",
                expected=tuple(known),
                got=name,
            )
        return known[name]()

    @classmethod
    def plain(cls) -> Numerics:
        """Return plain mathematics: nothing is rounded beyond the model's dtype; the default in float32."""
        return cls()

    @classmethod
    def ascend(cls, *, int8_weights: bool = False) -> Numerics:
        """Return what Ascend kernels compute on A2 and A3: bfloat16 caches, index keys rotated (and kept as int8).

        Args:
            int8_weights: as above; these chips have no FP8.
        """
        return cls(indexer_hadamard=True, int8_weights=int8_weights)

    @classmethod
    def official(cls) -> Numerics:
        """Return the choices of the current official code; the default in bfloat16."""
        return cls(
            kv_qdq=True,
            indexer_hadamard=True,
            indexer_qdq=True,
            index_score_rounding=True,
            query_norm_rounding=True,
            probability_rounding=True,
            activation_qdq="stored",
        )

    @classmethod
    def transformers(cls) -> Numerics:
        """Return the choices of transformers 5.24 with dequantised weights."""
        return cls(
            query_norm_rounding="factor",
            probability_rounding="normalised",
            rotary_rounding=True,
            pooling_rounding="all",
            router_rounding=True,
            router_epsilon=1e-20,
            routing_weight="after",
            expert_rounding=True,
            stream_rounding=True,
            head_rounding=True,
        )

    @classmethod
    def sglang(cls) -> Numerics:
        """Return the choices of SGLang 0.5.23 by default; what its attention kernels do inside is not established."""
        return cls(
            kv_qdq="wide",
            indexer_hadamard=True,
            indexer_qdq="fp8",
            entry_norm_rounding=False,
            pooling_rounding="none",
            router_epsilon=1e-20,
            routing_weight="after",
            activation_qdq="stored",
            head_rounding=True,
        )

    @classmethod
    def vllm_ascend(cls, *, newest: bool = False) -> Numerics:
        """Return the choices of vllm-ascend's model code, for plain kernels; its own kernels run ``ascend()``.

        Args:
            newest: chips with FP8: entries and index keys in e4m3 instead of bfloat16 and int8.
        """
        return cls(
            kv_qdq=newest,
            indexer_hadamard=True,
            indexer_qdq="fp8" if newest else "int8",
            window_yarn=True,
            router_epsilon=1e-20,
            routing_weight="summed",
            head_rounding=True,
        )
