"""The numeric choices in which implementations of DeepSeek-V4 differ, as one frozen value."""

from __future__ import annotations

import attrs

__all__ = ["Numerics"]


@attrs.frozen(kw_only=True)
class Numerics:
    """Named rounding and policy switches; a model is loaded with exactly one of these.

    Every switch is a fact about published implementations (model sheet, sections 2.12 and 3), not a tuning knob: two
    models that differ only here are two different functions.

    Attributes:
        kv_qdq: round the non-rotary part of window and compressed entries through e4m3 in groups of 64 (the official
            simulation of an FP8 cache).
        indexer_hadamard: rotate index queries and keys by a Walsh-Hadamard matrix.
        indexer_qdq: round index queries and keys through e2m1 in groups of 32.
        index_score_rounding: index dot products, relu and head sum in the model's dtype instead of f32.
        query_norm_rounding: per-head query norm with every step rounded to the model's dtype instead of f32 inside.
        probability_rounding: attention probabilities rounded to the model's dtype before they meet the values.
        clamp_shared_expert: apply ``swiglu_limit`` to the shared expert as well (the first official upload did not).
        int8_weights: round linear and expert weights to int8 by output channel, and the rows that meet them to int8 by
            row (W8A8); with Ascend kernels of the A2 and A3 only.
        mx_output: round the grouped output projection, weight and rows, through e4m3 with a power of two for every 32
            channels (MXFP8); with Ascend kernels of the A5 only.
        mx_experts: round the routed experts' weights and the rows that meet them likewise; with Ascend kernels of the
            A5 only.
        invariant: compute every row in an order that does not depend on which rows or chunks it came with, so that
            results are equal bit for bit over batch, row place and chunking.
    """

    kv_qdq: bool = False
    indexer_hadamard: bool = False
    indexer_qdq: bool = False
    index_score_rounding: bool = False
    query_norm_rounding: bool = False
    probability_rounding: bool = False
    clamp_shared_expert: bool = True
    int8_weights: bool = False
    mx_output: bool = False
    mx_experts: bool = False
    invariant: bool = False

    @classmethod
    def plain(cls) -> Numerics:
        """Return plain mathematics: nothing is rounded beyond the model's dtype; the default in float32."""
        return cls()

    @classmethod
    def ascend(cls, *, int8_weights: bool = False) -> Numerics:
        """Return what Ascend kernels compute on A2 and A3: bfloat16 caches, index keys rotated (and kept as int8).

        Args:
            int8_weights: as below; these chips have no FP8.
        """
        return cls(indexer_hadamard=True, int8_weights=int8_weights)

    @classmethod
    def ascend_a5(cls, *, mx_output: bool = True, mx_experts: bool = False) -> Numerics:
        """Return what Ascend kernels compute on the A5: FP8 caches, index keys rotated (and kept as FP8).

        Args:
            mx_output: as below; what production does.
            mx_experts: as below.
        """
        return cls(kv_qdq=True, indexer_hadamard=True, mx_output=mx_output, mx_experts=mx_experts)

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
        )
