"""Configuration of a DeepSeek-V4 model, with the field names of ``config.json``."""

from __future__ import annotations

import attrs

__all__ = ["Config", "RopeScaling"]


@attrs.frozen(kw_only=True)
class RopeScaling:
    """YaRN parameters of the layers that compress (``rope_scaling`` in ``config.json``)."""

    factor: float = 16.0
    original_max_position_embeddings: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@attrs.frozen(kw_only=True)
class Config:
    """A DeepSeek-V4 model's numbers, named as in ``config.json``.

    ``compress_ratios`` has one entry a layer: 0 (window only), 4 or 128. The constructor checks nothing, so that toys
    of any shape can be built; ``config_from_dict`` is the border that refuses what cannot run.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    compress_ratios: tuple[int, ...]
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    sliding_window: int = 128
    num_hash_layers: int = 0
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling | None = attrs.field(factory=RopeScaling)
    max_position_embeddings: int = 1048576
    bos_token_id: int | None = 0
    eos_token_id: tuple[int, ...] = (1,)
    torch_dtype: str = "bfloat16"

    def layer_ratio(self, layer: int) -> int:
        """Tell how many tokens one compressed entry of a layer stands for; 0 where nothing is compressed."""
        return self.compress_ratios[layer]

    def is_hash(self, layer: int) -> bool:
        """Tell whether a layer picks its experts by token id (a table) rather than by score."""
        return layer < self.num_hash_layers

    def n_layers_of_ratio(self, ratio: int) -> int:
        """Count the layers that compress by ``ratio``."""
        return self.compress_ratios.count(ratio)

    def layer_rope(self, layer: int) -> tuple[float, RopeScaling | None]:
        """Choose the rotary base and scaling that hold for everything inside a layer.

        Layers that compress use the long-context base and YaRN for queries, window, entries and index keys alike;
        window-only layers use the plain base.

        Returns:
            (theta, scaling): the base, and the YaRN parameters or None.
        """
        if self.layer_ratio(layer) == 0:
            return self.rope_theta, None
        return self.compress_rope_theta, self.rope_scaling

    @property
    def attention_scale(self) -> float:
        """The factor on attention scores, ``head_dim ** -0.5``; rotary scaling adds nothing to it."""
        return float(self.head_dim**-0.5)
