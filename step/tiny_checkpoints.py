"""Random tiny checkpoints under their official names, in memory, in a folder, or loaded.

Source: tensor names and layout of the DeepSeek-V4 releases; model sheet, section 3. The values are this package's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from ..model.loading import load_model
from ..model.model import Model
from .tiny_configs import configs

__all__ = ["TinyCheckpoint", "checkpoints", "random_tensors", "write_checkpoint"]

# Queries have a fixed norm, so only the keys' norm can make attention sharper: this gives scores a deviation of 1.5.
_KEY_CENTRE = 1.5


class _Weights:
    """Collects random tensors by name; matrices keep the scale of what they multiply."""

    def __init__(self, seed: int, storage: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.storage = storage
        self.tensors: dict[str, Tensor] = {}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def matrix(self, name: str, out: int, wide: int, gain: float = 1.0) -> None:
        self.tensors[name] = (self.normal(out, wide) * gain * wide**-0.5).to(self.storage)

    def norm(self, name: str, width: int, centre: float = 1.0) -> None:
        self.tensors[name] = (centre + 0.2 * self.normal(width)).to(self.storage)

    def exact(self, name: str, value: Tensor) -> None:
        self.tensors[name] = value.float() if value.is_floating_point() else value

    def streams(self, name: str, rows: int, scales: int, streams: int, hidden: int) -> None:
        self.exact(f"{name}_fn", self.normal(rows, streams * hidden) * (streams * hidden) ** -0.5)
        self.exact(f"{name}_base", 0.5 * self.normal(rows))
        self.exact(f"{name}_scale", 1 + 0.3 * self.normal(scales))

    def compressor(self, prefix: str, ratio: int, width: int, hidden: int, centre: float = 1.0) -> None:
        wide = width * (2 if ratio == 4 else 1)
        self.matrix(f"{prefix}.wkv.weight", wide, hidden)
        self.matrix(f"{prefix}.wgate.weight", wide, hidden)
        self.exact(f"{prefix}.ape", self.normal(ratio, wide))
        self.norm(f"{prefix}.norm.weight", width, centre)

    def expert(self, prefix: str, inter: int, hidden: int) -> None:
        self.matrix(f"{prefix}.w1.weight", inter, hidden)
        self.matrix(f"{prefix}.w2.weight", hidden, inter, gain=2.0)
        self.matrix(f"{prefix}.w3.weight", inter, hidden)

    def attention(self, prefix: str, config: Mapping[str, Any], ratio: int) -> None:
        c, hidden = config, config["hidden_size"]
        heads, width, rank = c["num_attention_heads"], c["head_dim"], c["q_lora_rank"]
        groups, low = c["o_groups"], c["o_lora_rank"]
        self.matrix(f"{prefix}.wq_a.weight", rank, hidden)
        self.norm(f"{prefix}.q_norm.weight", rank)
        self.matrix(f"{prefix}.wq_b.weight", heads * width, rank)
        self.matrix(f"{prefix}.wkv.weight", width, hidden)
        self.norm(f"{prefix}.kv_norm.weight", width, _KEY_CENTRE)
        self.exact(f"{prefix}.attn_sink", self.normal(heads))
        self.matrix(f"{prefix}.wo_a.weight", groups * low, heads * width // groups)
        self.matrix(f"{prefix}.wo_b.weight", hidden, groups * low)
        if ratio:
            self.compressor(f"{prefix}.compressor", ratio, width, hidden, _KEY_CENTRE)
        if ratio == 4:
            index_heads, index_width = c["index_n_heads"], c["index_head_dim"]
            self.matrix(f"{prefix}.indexer.wq_b.weight", index_heads * index_width, rank)
            self.matrix(f"{prefix}.indexer.weights_proj.weight", index_heads, hidden)
            self.compressor(f"{prefix}.indexer.compressor", ratio, index_width, hidden)

    def block(self, prefix: str, config: Mapping[str, Any], ratio: int, is_hash: bool) -> None:
        c, hidden, n = config, config["hidden_size"], config["hc_mult"]
        experts, vocab = c["n_routed_experts"], c["vocab_size"]
        for kind in ("attn", "ffn"):
            self.norm(f"{prefix}.{kind}_norm.weight", hidden)
            self.streams(f"{prefix}.hc_{kind}", (2 + n) * n, 3, n, hidden)
        self.attention(f"{prefix}.attn", c, ratio)
        self.matrix(f"{prefix}.ffn.gate.weight", experts, hidden)
        if is_hash:
            order = torch.rand(vocab, experts, generator=self.generator).argsort(-1)
            self.exact(f"{prefix}.ffn.gate.tid2eid", order[:, : c["num_experts_per_tok"]].contiguous())
        else:
            self.exact(f"{prefix}.ffn.gate.bias", 0.3 * self.normal(experts))
        for name in ("shared_experts", *(f"experts.{e}" for e in range(experts))):
            self.expert(f"{prefix}.ffn.{name}", c["moe_intermediate_size"], hidden)

    def head(self, prefix: str, config: Mapping[str, Any]) -> None:
        n, hidden = config["hc_mult"], config["hidden_size"]
        self.norm(f"{prefix}norm.weight", hidden)
        self.streams(f"{prefix}hc_head", n, 1, n, hidden)


def random_tensors(
    config: Mapping[str, Any], seed: int, storage: torch.dtype = torch.float32, *, mtp: bool = False
) -> dict[str, Tensor]:
    """Draw every tensor of an unquantised checkpoint, by official name.

    Nothing is left at a neutral value (norms, sinks, position biases, selection biases and mHC included), logits have a
    standard deviation of about 2, and no softmax is flat or saturated.

    Args:
        config: as ``tiny_config`` makes it.
        seed: of the draw; independent of any global generator.
        storage: dtype of what the released files hold in BF16 or FP8; float32 and int64 tensors stay so.
        mtp: also draw the draft block ``mtp.0``, which a loader must skip.
    """
    w = _Weights(seed, storage)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    # One embedding row is used as it is, so its entries have unit scale.
    w.tensors["embed.weight"] = w.normal(vocab, hidden).to(storage)
    for layer in range(config["num_hidden_layers"]):
        ratio = config["compress_ratios"][layer]
        w.block(f"layers.{layer}", config, ratio, is_hash=layer < config["num_hash_layers"])
    w.head("", config)
    w.matrix("head.weight", vocab, hidden, gain=2.0)
    if mtp:
        w.block("mtp.0", config, 0, is_hash=False)
        for name in ("e_proj", "h_proj"):
            w.matrix(f"mtp.0.{name}.weight", hidden, hidden)
        for name in ("enorm", "hnorm"):
            w.norm(f"mtp.0.{name}.weight", hidden)
        w.head("mtp.0.", config)
    return w.tensors


def write_checkpoint(
    folder: str | PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: int = 1
) -> Path:
    """Write ``config.json`` and the tensors, in one file or in ``shards`` files with an index; return the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    size = math.ceil(len(names) / shards)
    weight_map = {}
    for shard in range(shards):
        part = names[shard * size : (shard + 1) * size]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return folder


@attrs.frozen(eq=False, kw_only=True)
class TinyCheckpoint:
    """A checkpoint as what decides it: every use of it draws the same weights.

    Attributes:
        config: ``config.json`` as a dict.
        seed: of the weights.
        storage: dtype that they are kept in.
    """

    config: Mapping[str, Any]
    seed: int = 0
    storage: torch.dtype = torch.float32

    def tensors(self) -> dict[str, Tensor]:
        """Draw the weights, by official name."""
        return random_tensors(self.config, self.seed, self.storage)

    def write(self, folder: str | PathLike[str], shards: int = 1) -> Path:
        """Write it as a release would; return the folder."""
        return write_checkpoint(folder, self.config, self.tensors(), shards)

    def load(self, **options: Any) -> Model:
        """Load it, through files like any other.

        Args:
            options: keyword arguments of ``load_model``.
        """
        with TemporaryDirectory() as folder:
            return load_model(self.write(folder), **options)


def checkpoints(drawn: st.SearchStrategy[dict[str, Any]] | None = None) -> st.SearchStrategy[TinyCheckpoint]:
    """Draw a tiny checkpoint.

    Args:
        drawn: configs; default ``configs()``.
    """
    return st.builds(TinyCheckpoint, config=configs() if drawn is None else drawn, seed=st.integers(0, 2**16))
