"""Sizes: the arithmetic of the released models, and of any model against what is really allocated and written."""

from __future__ import annotations

import json
import re
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
from purestep.model.layout import draft_pieces, tensor_pieces
from purestep.model.leaves import leaves_from_params
from purestep.model.loading import build_model, is_widened
from purestep.model.random_source import RandomSource
from purestep.model.storage import FORMS, TYPES, Storage, cells_of
from purestep.model.streaming import stream_checkpoint
from purestep.serving.costs import (
    active_parameters,
    cache_costs,
    file_report,
    part_costs,
    pool_bytes,
    smallest_layout,
    weight_bytes,
)
from purestep.serving.info import info_tables, show_bytes, show_layers
from purestep.state.config import Config
from purestep.state.config_reading import config_from_dict, config_to_dict
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
    report = file_report(folder, config)
    assert report is not None
    assert not report.faults
    found = report.bytes_by_part()
    assert sum(found.values()) == sum(tensor.nbytes for tensor in official_tensors(config, params).values())
    stored = attrs.evolve(config, torch_dtype=str(dtype).removeprefix("torch."))
    assert found == {name: cost.n_bytes for name, cost in part_costs(stored).items()}


def test_files_with_foreign_tensors_are_counted_apart(tmp_path: Path) -> None:
    """Tensors that belong to no weight of the main model are counted under names of their own, and are a fault."""
    config = config_from_dict(tiny_config((0,)))
    params = init_params(config, torch.Generator(), torch.float32)
    extra = {"layers.0.attn.wq_a.scale": torch.zeros(3, dtype=torch.float8_e8m0fnu), "mtp.0.x": torch.zeros(5)}
    save_file(official_tensors(config, params) | extra, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(config)))
    report = file_report(tmp_path, config)
    assert report is not None
    assert report.bytes_by_part()["foreign"] == 3
    assert report.bytes_by_part()["draft block"] == 5 * 4
    assert list(report.faults.values()) == [["layers.0.attn.wq_a.scale"]]
    text = shown(list(info_tables(tmp_path)))
    assert "layers.0.attn.wq_a.scale" in text
    assert re.search(r"complete\s+│ +no", text)


@settings(max_examples=6, deadline=None)
@given(
    raw=configs(max_layers=3),
    form=st.sampled_from([*FORMS.values(), Storage(linear="fp8")]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_weights_take_the_memory_that_is_told(
    tmp_path_factory: pytest.TempPathFactory, raw: dict[str, Any], form: Storage, dtype: str
) -> None:
    """The memory of any model's weights, stored or not, is computed to the byte."""
    wide = "BF16" if dtype == "bfloat16" else "F32"
    config, storage = config_from_dict(raw), attrs.evolve(form, wide=wide)
    folder = tmp_path_factory.mktemp("model")
    source = RandomSource(config=config, has_draft=True, storage=storage, seed=0)
    stream_checkpoint(folder / "model", source, storage)
    model = ps.load_model(folder / "model")
    assert str(model.dtype) == f"torch.{dtype}"
    total = sum(leaf.nbytes for leaf in leaves_from_params(model.params).values())
    assert sum(weight_bytes(model.config, storage).values()) == total


def test_flash_takes_its_released_bytes_and_what_is_widened() -> None:
    """Flash in memory is the release without its draft block and 1.76 GB for what is kept in float32."""
    storage = FORMS["fp4"]
    sizes = weight_bytes(FLASH, storage)
    draft = sum(
        prod(cell.shape) * TYPES[cell.type].itemsize for p in draft_pieces(FLASH) for cell in cells_of(p, storage)
    )
    assert draft == 3_593_787_756
    widened = sum(size // 2 for path, size in sizes.items() if is_widened(path))
    assert widened == 1_758_305_536
    assert sum(sizes.values()) == 159_609_485_896 - draft + widened == 157_774_003_676


def test_layouts_are_the_smallest_that_fit() -> None:
    """A degree divides heads, groups, index heads, experts and vocabulary, and one degree less would not fit."""
    sizes = weight_bytes(PRO, FORMS["fp4"])
    found = [smallest_layout(PRO, sizes, 0, gib << 30) for gib in (2000, 410, 141, 64, 10)]
    assert found == [1, 2, 8, 16, None]


def test_released_sizes_are_read_without_memory(tmp_path: Path) -> None:
    """A folder of Flash's full size, whose files hold nothing but headers, is described and found complete."""
    storage, pieces = FORMS["fp4"], [*tensor_pieces(FLASH), *draft_pieces(FLASH)]
    cells = [cell for piece in pieces for cell in cells_of(piece, storage)]
    owners = {}
    for at in range(8):
        own, offset, header = cells[at::8], 0, {}
        for cell in own:
            end = offset + prod(cell.shape) * TYPES[cell.type].itemsize
            header[cell.name] = {"dtype": cell.type, "shape": cell.shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        with (tmp_path / f"{at}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + offset)
        owners |= {cell.name: f"{at}.safetensors" for cell in own}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(FLASH) | {"expert_dtype": "fp4"}))
    text = shown(list(info_tables(tmp_path)))
    assert all(part in text for part in ("159,609,485,896", "69,187", "157,774,003,676", "DeepSeek-V4-Flash"))
    assert re.search(r"complete\s+│ +yes", text)


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
