"""Sizes: the arithmetic of the released models, and of any model against what is really allocated and written."""

from __future__ import annotations

import json
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.configs import configs, tiny_config
from purestep.model.checkpoint import init_params, official_tensors, parameter_count, write_checkpoint
from purestep.model.loading import build_model
from purestep.serving.costs import active_parameters, cache_costs, file_bytes, part_costs, pool_bytes
from purestep.serving.info import info_tables, show_bytes, show_layers
from purestep.state.config import Config
from purestep.state.config_reading import config_from_dict
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

COMMON: dict[str, Any] = {
    "vocab_size": 129280,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "num_hash_layers": 3,
}

FLASH = Config(
    **COMMON,
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    q_lora_rank=1024,
    o_groups=8,
    compress_ratios=(0, 0, *(4, 128) * 20, 4),
    moe_intermediate_size=2048,
    n_routed_experts=256,
    index_topk=512,
)

PRO = Config(
    **COMMON,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
    o_groups=16,
    compress_ratios=(128, 128, *(4, 128) * 29, 4),
    moe_intermediate_size=3072,
    n_routed_experts=384,
    index_topk=1024,
)

# Computed by hand from the shapes of the released checkpoints: total, active, embedding, routed experts, indexers,
# compressors, bytes a token, window bytes, pooling bytes.
RELEASED = {
    "Flash": (FLASH, 284_332_240_471, 13.800e9, 529_530_880, 43 * 6_442_450_944, 21 * 10_749_056,
              21 * 8_393_216 + 20 * 4_260_352, 6_880, 43 * 131_072, 12_206_080),
    "Pro": (PRO, 1_572_997_201_763, 49.779e9, 926_679_040, 61 * 25_367_150_592, 30 * 16_712_832,
            30 * 14_684_672 + 31 * 7_406_080, 9_848, 61 * 131_072, 18_710_528),
}  # fmt: skip


@pytest.mark.parametrize("numbers", RELEASED.values(), ids=RELEASED.keys())
def test_released_models_have_their_sizes(numbers: tuple[Any, ...]) -> None:
    """Parameters by part and cache bytes of both released models are what their checkpoints and layouts have."""
    config, total, active, embed, routed, indexers, compressors, per_token, window, pooling = numbers
    parts = {name: cost.n_parameters for name, cost in part_costs(config).items()}
    assert sum(parts.values()) == parameter_count(config) == total
    assert active_parameters(config) == pytest.approx(active, abs=5e5)
    assert (parts["embedding"], parts["head"], parts["routed experts"]) == (embed, embed, routed)
    assert (parts["indexers"], parts["compressors"]) == (indexers, compressors)
    costs = cache_costs(config)
    assert sum(cost.per_token for cost in costs.values()) == per_token
    assert (costs["window"].fixed, costs["pooling state"].fixed) == (window, pooling)
    assert sum(cost.fixed for cost in costs.values()) == window + pooling
    wide = cache_costs(config, torch.float32)
    assert (wide["window"].fixed, wide["pooling state"].fixed) == (2 * window, pooling)


def shown(tables: list[Table]) -> str:
    """Render tables as a pipe would get them."""
    console = Console(width=120)
    with console.capture() as capture:
        console.print(*tables)
    return capture.get()


def test_info_of_a_bare_config_is_arithmetic(tmp_path: Path) -> None:
    """A folder with nothing but a ``config.json`` is enough; layers come as ranges, files are not spoken of."""
    fields = attrs.asdict(PRO) | {"model_type": "deepseek_v4", "compress_ratios": [*PRO.compress_ratios, 0]}
    fields |= {"scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "hidden_act": "silu"}
    fields |= {"eos_token_id": 1, "rope_scaling": {"type": "yarn", **fields["rope_scaling"]}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    text = shown(list(info_tables(tmp_path, context=1_048_576, requests=8)))
    for number in ("1,572,997,201,763", "9,848", "0-1, 3-59 step 2", "2-60 step 2", "8 x 1,048,576 tokens"):
        assert number in text
    assert "files" not in text


@settings(max_examples=20)
@given(
    raw=configs(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    requests=st.integers(1, 3),
    context=st.integers(1, 300),
)
def test_pools_have_the_size_that_is_allocated(raw: dict[str, Any], dtype: str, requests: int, context: int) -> None:
    """The pools of any model are as large as ``init_state`` makes them, buffer by buffer."""
    config = config_from_dict(raw | {"torch_dtype": dtype})
    torch_dtype = getattr(torch, dtype)
    model = build_model(config, init_params(config, torch.Generator(), torch_dtype), dtype=torch_dtype)
    capacity = ps.Capacity(requests=requests, tokens=requests * context, context=context)
    handle = ps.init_state(model, capacity).kv.handle
    found = {name: prod(handle.spec(name)[0]) * handle.spec(name)[1].itemsize for name in handle.names}
    assert pool_bytes(config, capacity) == found
    assert sum(found.values()) == handle.nbytes


@settings(max_examples=5)
@given(raw=configs(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_files_have_the_bytes_that_are_written(
    tmp_path_factory: pytest.TempPathFactory, raw: dict[str, Any], dtype: torch.dtype
) -> None:
    """Bytes by part are those of the tensors in the files, and those that the arithmetic gives for their dtype."""
    config = config_from_dict(raw)
    params = init_params(config, torch.Generator(), dtype)
    folder = tmp_path_factory.mktemp("written")
    write_checkpoint(folder, config, params, max_shard_bytes=50_000)
    found = file_bytes(folder, config)
    assert sum(found.values()) == sum(tensor.nbytes for tensor in official_tensors(config, params).values())
    stored = attrs.evolve(config, torch_dtype=str(dtype).removeprefix("torch."))
    assert found == {name: cost.n_bytes for name, cost in part_costs(stored).items()}


def test_files_with_foreign_tensors_are_counted_apart(tmp_path: Path) -> None:
    """Tensors that are no parameters of the main model, scales for one, are counted under a name of their own."""
    config = config_from_dict(tiny_config((0,)))
    params = init_params(config, torch.Generator(), torch.float32)
    extra = {"layers.0.attn.wq_a.scale": torch.zeros(3, dtype=torch.float8_e8m0fnu), "mtp.0.x": torch.zeros(5)}
    save_file(official_tensors(config, params) | extra, tmp_path / "model.safetensors")
    assert file_bytes(tmp_path, config)["scales, draft block"] == 3 + 5 * 4


@given(st.sets(st.integers(0, 40)))
def test_ranges_name_exactly_the_layers(layers: set[int]) -> None:
    """A list of layers, written as ranges, reads back to the same layers in order."""
    read: list[int] = []
    for part in filter(None, show_layers(sorted(layers)).split(", ")):
        ends, _, step = part.partition(" step ")
        first, _, last = ends.partition("-")
        read += range(int(first), int(last or first) + 1, int(step or 1))
    assert read == sorted(layers)


@pytest.mark.parametrize(
    ("layers", "text"),
    [([], ""), ([5], "5"), ([0, 1], "0-1"), ([1, 3], "1, 3"), ([1, 3, 5, 6, 7], "1-5 step 2, 6-7")],
)
def test_ranges_are_short_where_there_is_a_pattern(layers: list[int], text: str) -> None:
    """Neighbours and evenly spaced layers become ranges, anything else stays single."""
    assert show_layers(layers) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"),
        (999, "999"),
        (5_636_096, "5,636,096 (5.64 MB)"),
        (Fraction(73, 16), "4.56"),
        (10**12, "1,000,000,000,000 (1.00 TB)"),
    ],
)
def test_bytes_are_shown_exactly_and_in_a_unit(size: int | Fraction, text: str) -> None:
    """Sizes are exact, and from a thousand on rounded in a larger unit as well."""
    assert show_bytes(size) == text
