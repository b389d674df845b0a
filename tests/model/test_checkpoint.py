"""Checkpoints: what is there is read exactly, what is wrong is refused by name, what is written is read back."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import kit.checkpoints as kit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.configs import configs, tiny_config
from purestep.model.checkpoint import (
    CheckpointNote,
    expected_shapes,
    init_params,
    official_tensors,
    parameter_count,
    read_checkpoint,
    write_checkpoint,
)
from purestep.model.layout import DIALECTS, leaf_shapes, tensor_pieces
from purestep.model.leaves import leaves_from_params, params_from_leaves
from purestep.model.params import Params
from purestep.state.config import Config
from purestep.state.config_reading import config_from_dict
from purestep.state.errors import CheckpointError, ConfigError, DtypeError, ShapeError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM
from transformers.utils import logging as transformers_logging

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

FLASH = Config(
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    compress_ratios=(0, 0, *(4, 128) * 20, 4),
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=6,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    num_hash_layers=3,
)
PRO = attrs.evolve(
    FLASH,
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

TINY = tiny_config(experts=3, vocab=24, hidden=16, inter=8, head_dim=16, index_heads=4, o_lora=4, q_lora=8)
TENSORS = kit.random_tensors(TINY, 0)
NAMES = sorted(TENSORS)


def make(folder: Path, tensors: dict[str, Tensor] | None = None, shards: int = 1, config: Any = None) -> Path:
    """Write a checkpoint in an empty folder; by default the tiny one."""
    shutil.rmtree(folder, ignore_errors=True)
    return kit.write_checkpoint(folder, config or TINY, TENSORS if tensors is None else tensors, shards)


def refusal(folder: Path) -> str:
    """Return the message with which a checkpoint is refused, having made sure that no weight was read."""
    read: list[str] = []
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder, progress=lambda done, total, name: read.append(name))
    assert not read
    assert str(folder) in str(caught.value)
    return str(caught.value)


def bits(tensor: Tensor) -> Tensor:
    """See a tensor as bytes."""
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_same(left: Params, right: Params) -> None:
    """Compare weights bit for bit, types included."""
    mine, theirs = leaves_from_params(left), leaves_from_params(right)
    assert mine.keys() == theirs.keys()
    for path, leaf in mine.items():
        assert leaf.dtype == theirs[path].dtype, path
        assert torch.equal(bits(leaf), bits(theirs[path])), path


def released_tensors(config: Config) -> dict[str, int]:
    """List the tensors of a release with scales and draft block: bytes by name (sheet arithmetic, FP8 and FP4)."""
    shapes = dict(expected_shapes(config))
    hidden = config.hidden_size
    # The draft block is a window-only layer with selection bias, so any such layer tells its tensors.
    plain = attrs.evolve(config, num_hidden_layers=1, compress_ratios=(0,), num_hash_layers=0)
    for name, entry in expected_shapes(plain).items():
        if name.startswith("layers.0."):
            shapes[name.replace("layers.0.", "mtp.0.")] = entry
    shapes |= {f"mtp.0.{name}.weight": ((hidden, hidden), "linear") for name in ("e_proj", "h_proj")}
    shapes |= {f"mtp.0.{name}.weight": ((hidden,), "norm") for name in ("enorm", "hnorm", "norm")}
    shapes |= {f"mtp.0.{name}": shapes[name] for name in ("hc_head_fn", "hc_head_base", "hc_head_scale")}
    sizes = {}
    for name, (shape, kind) in shapes.items():
        scale = name.removesuffix("weight") + "scale"
        if kind == "linear":
            sizes[name], sizes[scale] = math.prod(shape), math.prod(math.ceil(side / 128) for side in shape)
        elif kind == "expert":
            sizes[name], sizes[scale] = math.prod(shape) // 2, math.prod(shape) // 32
        else:
            sizes[name] = math.prod(shape) * {"plain": 2, "norm": 2, "f32": 4, "ids": 8}[kind]
    return sizes


@pytest.mark.parametrize(
    ("config", "n_tensors", "n_bytes", "n_params"),
    [
        (FLASH, 69_187, 159_609_485_896, 284_332_240_471),
        (PRO, 145_116, 864_704_792_696, 1_572_997_201_763),
    ],
    ids=["flash", "pro"],
)
def test_layout_has_the_published_totals(config: Config, n_tensors: int, n_bytes: int, n_params: int) -> None:
    """Names, shapes and kinds add up to the tensor count, the bytes and the parameters of the releases."""
    sizes = released_tensors(config)
    assert len(sizes) == n_tensors
    assert sum(sizes.values()) == n_bytes
    assert parameter_count(config) == n_params


def test_layers_have_the_published_number_of_tensors() -> None:
    """A window-only layer of Flash has 1565 tensors, a C4 layer 1576, a C128 layer 1569, the draft block 1575."""
    owners = Counter(".".join(name.split(".")[:2]) for name in released_tensors(FLASH))
    assert [owners[f"layers.{layer}"] for layer in (0, 1, 2, 3, 41, 42)] == [1565, 1565, 1576, 1569, 1569, 1576]
    assert owners["mtp.0"] == 1575


@pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_names_are_one_to_one(config: Config, dialect: Any) -> None:
    """In every dialect each tensor has its own name and its own block of a leaf, and no leaf is left out (LOD-07)."""
    pieces = list(tensor_pieces(config, dialect))
    assert len({piece.name for piece in pieces}) == len(pieces)
    assert len({(piece.leaf, str(piece.block)) for piece in pieces}) == len(pieces)
    filled: Counter[str] = Counter()
    for piece in pieces:
        filled[piece.leaf] += math.prod(piece.shape)
    assert filled == {path: math.prod(shape) for path, (shape, _) in leaf_shapes(config).items()}


@settings(max_examples=20)
@given(raw=configs(), dialect=st.sampled_from(DIALECTS))
def test_tensors_fill_every_leaf_once(raw: dict[str, Any], dialect: Any) -> None:
    """The blocks of all tensors cover each element of each leaf exactly once."""
    config = config_from_dict(raw)
    hits = {path: torch.zeros(shape, dtype=torch.int32) for path, (shape, _) in leaf_shapes(config).items()}
    for piece in tensor_pieces(config, dialect):
        part = hits[piece.leaf][piece.block]
        assert part.shape == piece.shape
        part += 1
    assert all(bool((hit == 1).all()) for hit in hits.values())


def test_official_names_are_those_of_the_release() -> None:
    """The names and shapes are those of an independently written official checkpoint."""
    shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    assert {name: shape for name, (shape, _) in expected_shapes(config_from_dict(TINY)).items()} == shapes


@settings(max_examples=15, deadline=None)
@given(
    raw=configs(max_layers=3),
    seed=st.integers(0, 9),
    storage=st.sampled_from([torch.float32, torch.bfloat16]),
    shards=st.sampled_from([1, 3]),
)
def test_official_tensors_come_back(
    tmp_path_factory: Any, raw: dict[str, Any], seed: int, storage: torch.dtype, shards: int
) -> None:
    """Reading loses nothing: every official tensor of any model is found again, bit for bit; the draft block is not."""
    tensors = kit.random_tensors(raw, seed, storage, mtp=True)
    folder = make(tmp_path_factory.mktemp("model"), tensors, shards, raw)
    config, params = read_checkpoint(folder, dtype=storage)
    assert config == config_from_dict(raw)
    back = official_tensors(config, params)
    assert back.keys() == {name for name in tensors if not name.startswith("mtp.")}
    for name, tensor in back.items():
        assert tensor.dtype == tensors[name].dtype, name
        assert torch.equal(bits(tensor), bits(tensors[name])), name


def test_dialects_give_the_same_weights(tmp_path: Path) -> None:
    """Official names, transformers' module names and what transformers saves give bitwise equal weights."""
    _, official = read_checkpoint(make(tmp_path / "official"))
    _, modules = read_checkpoint(make(tmp_path / "modules", kit.to_transformers_state(TENSORS), shards=2))
    kit.peer_model(TINY, TENSORS).save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    _, saved = read_checkpoint(tmp_path / "saved")
    assert_same(official, modules)
    assert_same(official, saved)


def test_saved_in_bfloat16_by_transformers(tmp_path: Path) -> None:
    """A model that transformers saved in BF16, F32 parts included, is read, and its F32 parts are widened."""
    model = kit.peer_model(TINY, TENSORS).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    config, params = read_checkpoint(tmp_path)
    assert config.torch_dtype == "bfloat16"
    kinds = expected_shapes(config)
    for name, tensor in official_tensors(config, params).items():
        assert tensor.dtype == {"f32": torch.float32, "ids": torch.int64}.get(kinds[name][1], torch.bfloat16), name
        assert torch.equal(tensor, TENSORS[name].to(torch.bfloat16).to(tensor.dtype)), name


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    """transformers loads a written checkpoint with no tensor missing or unexpected, and has the same weights."""
    write_checkpoint(tmp_path, *read_checkpoint(make(tmp_path / "source")), max_shard_bytes=30_000)
    model, info = DeepseekV4ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    state = model.state_dict()
    for name, tensor in kit.to_transformers_state(TENSORS).items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("limit", [None, 20_000, 1], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_save_load_save_is_bitwise_equal(tmp_path: Path, limit: int | None, dtype: torch.dtype | None) -> None:
    """Writing what was read from a written checkpoint gives the same files, byte for byte (LOD-07)."""
    config, params = read_checkpoint(make(tmp_path / "source"))
    write_checkpoint(tmp_path / "first", config, params, dtype=dtype, max_shard_bytes=limit)
    config, params = read_checkpoint(tmp_path / "first")
    write_checkpoint(tmp_path / "second", config, params, max_shard_bytes=limit)
    first = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()}
    assert config.torch_dtype == ("bfloat16" if dtype else "float32")
    assert (len(first) > 2) == (limit is not None)


def test_shards_keep_their_limit(tmp_path: Path) -> None:
    """No file holds more bytes of weights than asked, unless it is a single tensor."""
    config, params = read_checkpoint(make(tmp_path / "source"))
    write_checkpoint(tmp_path / "out", config, params, max_shard_bytes=4000)
    for path in (tmp_path / "out").glob("*.safetensors"):
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(t.numel() * t.element_size() for t in tensors.values()) <= 4000
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in TENSORS.values())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dtype_asked_for(tmp_path: Path, stored: torch.dtype, asked: torch.dtype | None) -> None:
    """Weights have the dtype asked for, by default the config's; F32 parts are F32 and tables I64 in any case."""
    tensors = {name: t.to(stored) if t.is_floating_point() else t.to(torch.int32) for name, t in TENSORS.items()}
    config, params = read_checkpoint(make(tmp_path / "model", tensors), dtype=asked)
    kinds = expected_shapes(config)
    for name, tensor in official_tensors(config, params).items():
        kept = {"f32": torch.float32, "ids": torch.int64}.get(kinds[name][1], asked or torch.float32)
        assert tensor.dtype == kept, name
        assert torch.equal(tensor, tensors[name].to(kept)), name


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "float32"], ids=str)
def test_other_dtypes_are_refused(tmp_path: Path, dtype: Any) -> None:
    """A dtype that the model cannot have is refused by name."""
    folder = make(tmp_path / "model")
    with pytest.raises(DtypeError, match=r"dtype: expected .*got .*(int8|float8_e4m3fn|float32)"):
        read_checkpoint(folder, dtype=dtype)


def test_weights_own_their_memory(tmp_path: Path) -> None:
    """Weights lie at aligned addresses and outlive their files, whatever happens to those."""
    config, params = read_checkpoint(make(tmp_path / "model"))
    assert all(leaf.data_ptr() % 64 == 0 for leaf in leaves_from_params(params).values())
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    path.write_bytes(b"")
    for name, tensor in official_tensors(config, params).items():
        assert torch.equal(tensor, TENSORS[name]), name


def test_progress_tells_every_tensor(tmp_path: Path) -> None:
    """The callback hears of every tensor once, counted up to the total."""
    calls: list[tuple[int, int, str]] = []
    read_checkpoint(make(tmp_path / "model", shards=2), progress=lambda *call: calls.append(call))
    assert [done for done, _, _ in calls] == list(range(1, len(NAMES) + 1))
    assert {total for _, total, _ in calls} == {len(NAMES)}
    assert sorted(name for _, _, name in calls) == NAMES


@settings(max_examples=20, deadline=None)
@given(gone=st.sets(st.sampled_from(NAMES), min_size=1, max_size=30), shards=st.sampled_from([1, 2]))
def test_missing_tensors_are_named(tmp_path_factory: Any, gone: set[str], shards: int) -> None:
    """Whatever tensors are missing, loading fails and names them, up to twenty, with their number (LOD-01)."""
    rest = {name: tensor for name, tensor in TENSORS.items() if name not in gone}
    text = refusal(make(tmp_path_factory.mktemp("model"), rest, shards))
    assert f"{len(gone)} missing tensors" in text
    assert sum(f"{name}," in text or f"{name}\n" in text for name in gone) >= min(len(gone), 20)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.compressor.wkv.weight",
        "layers.0.ffn.gate.bias",
        "layers.1.ffn.gate.tid2eid",
        "layers.4.attn.wq_a.weight",
        "layers.0.ffn.experts.3.w1.weight",
        "layers.0.attn.wq_a.bias",
        "model.norm.weight",
        "rotary.inv_freq",
        "xmtp.0.norm.weight",
    ],
)
def test_left_over_tensors_are_named(tmp_path: Path, name: str) -> None:
    """A tensor that the model has no place for makes loading fail and is named (LOD-01, MTH-07)."""
    text = refusal(make(tmp_path / "model", TENSORS | {name: torch.ones(2)}))
    assert f"1 left-over tensors: {name}" in text


@pytest.mark.parametrize("name", ["layers.1.ffn.gate.bias", "layers.0.ffn.gate.tid2eid"])
def test_routing_tensors_are_never_made_up(tmp_path: Path, name: str) -> None:
    """A selection bias under a wrong name, or a missing expert table, is an error and not zeros (MTH-07)."""
    tensors = {(f"{key}_" if key == name else key): tensor for key, tensor in TENSORS.items()}
    text = refusal(make(tmp_path / "model", tensors))
    assert f"1 missing tensors: {name}" in text
    assert f"1 left-over tensors: {name}_" in text


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_all_faults_come_in_one_error(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Missing, left-over, misshapen and mistyped tensors are all named by one error."""
    order = data.draw(st.permutations(NAMES))
    gone, grown, typed = order[:2], order[2:4], order[4:6]
    tensors = {name: tensor for name, tensor in TENSORS.items() if name not in gone}
    for name in grown:
        tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    for name in typed:
        tensors[name] = tensors[name].to(torch.float64)
    text = refusal(make(tmp_path_factory.mktemp("model"), tensors | {"extra": torch.ones(1)}))
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert all(name in lines["2 missing tensors"] for name in gone)
    assert "extra" in lines["1 left-over tensors"]
    for name in grown:
        expected, got = list(TENSORS[name].shape), list(tensors[name].shape)
        assert f"{name} (expected {expected}, got {got})" in lines["2 tensors of a wrong shape"]
    for name in typed:
        assert name in lines["2 tensors of a wrong type"]
        assert "got F64" in lines["2 tensors of a wrong type"]


def test_config_of_another_model_names_the_difference(tmp_path: Path) -> None:
    """A config that does not belong to the weights is refused with the tensors that tell."""
    text = refusal(make(tmp_path / "model", config=TINY | {"hidden_size": 32, "num_hash_layers": 2}))
    assert "layers.1.ffn.gate.tid2eid" in text
    assert "layers.1.ffn.gate.bias" in text
    assert "embed.weight (expected [24, 32], got [24, 16])" in text


def test_mix_scales_are_no_quantisation(tmp_path: Path) -> None:
    """The weights called scale of a layer too many are left over, not taken for quantised storage (LOD-03)."""
    fewer = TINY | {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128]}
    text = refusal(make(tmp_path / "model", kit.to_transformers_state(TENSORS), config=fewer))
    assert "left-over tensors" in text
    assert "left-over scales" not in text


def test_lone_scales_are_named(tmp_path: Path) -> None:
    """A plain weight with a scale beside it is refused, and the scale named (LOD-03)."""
    text = refusal(make(tmp_path / "model", TENSORS | {"layers.0.attn.wq_a.scale": torch.ones(1, 1)}))
    assert "1 left-over scales (scale, the release's own layout): layers.0.attn.wq_a.scale" in text


def test_dspark_draft_blocks_are_refused(tmp_path: Path) -> None:
    """More draft blocks than one belong to another release and are refused by name."""
    draft = {"mtp.0.norm.weight": torch.ones(16), "mtp.1.norm.weight": torch.ones(16)}
    text = refusal(make(tmp_path / "model", TENSORS | draft))
    assert "DSpark" in text
    assert "mtp.1.norm.weight" in text
    assert "mtp.0.norm.weight" not in text


def test_files_outside_the_index_are_ignored_and_mentioned(tmp_path: Path) -> None:
    """The index wins over a stray file with the same tensor names, and the stray is mentioned (LOD-05)."""
    folder = make(tmp_path / "model", shards=2)
    save_file({name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}, folder / "model.safetensors")
    with pytest.warns(CheckpointNote, match=r"ignored 1 files .*: model\.safetensors"):
        config, params = read_checkpoint(folder)
    for name, tensor in official_tensors(config, params).items():
        assert torch.equal(tensor, TENSORS[name]), name


def test_single_file_wins_over_strays(tmp_path: Path) -> None:
    """Without an index, ``model.safetensors`` wins; a sole file may have any name; two without a name are refused."""
    folder = make(tmp_path / "model")
    save_file({"norm.weight": torch.zeros(16)}, folder / "other.safetensors")
    with pytest.warns(CheckpointNote, match=r"other\.safetensors"):
        read_checkpoint(folder)
    (folder / "model.safetensors").rename(folder / "model0-mp1.safetensors")
    text = refusal(folder)
    assert "several safetensors files" in text
    assert "model0-mp1.safetensors" in text
    (folder / "other.safetensors").unlink()
    read_checkpoint(folder)
    (folder / "model0-mp1.safetensors").unlink()
    assert "no safetensors file" in refusal(folder)


def edit_index(folder: Path, edit: Callable[[dict[str, str]], None]) -> None:
    """Change the weight map of a checkpoint in place."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def test_copies_outside_the_index_are_ignored(tmp_path: Path) -> None:
    """A second copy of a tensor, in a shard that the index does not give for it, is ignored and mentioned (LOD-05)."""
    folder = make(tmp_path / "model", shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    assert "embed.weight" not in tensors
    save_file(tensors | {"embed.weight": torch.zeros(24, 16), "loose": torch.ones(1)}, shard)
    with pytest.warns(CheckpointNote, match=r"ignored 2 files or tensors .*embed\.weight in .*loose in "):
        config, params = read_checkpoint(folder)
    assert torch.equal(official_tensors(config, params)["embed.weight"], TENSORS["embed.weight"])


def test_index_must_be_true(tmp_path: Path) -> None:
    """Tensors that the index places wrongly or leaves out are named."""
    folder = make(tmp_path / "model", shards=2)
    edit_index(folder, lambda index: index.update({"embed.weight": "model-00002-of-00002.safetensors"}))
    text = refusal(folder)
    assert "1 tensors that the index places in a file that lacks them: embed.weight" in text
    assert "missing tensors" not in text
    folder = make(tmp_path / "model", shards=2)
    edit_index(folder, lambda index: index.pop("embed.weight") and None)
    assert "1 missing tensors: embed.weight" in refusal(folder)


@pytest.mark.parametrize("name", ["../other.safetensors", "sub/x.safetensors", "/etc/passwd", "..", ""])
def test_index_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    """An index that points out of the folder is refused."""
    folder = make(tmp_path / "model", shards=2)
    edit_index(folder, lambda index: index.update({"embed.weight": name}))
    text = refusal(folder)
    assert "weight_map" in text or "unreadable" in text


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "\xff"]
)
def test_damaged_index_is_refused(tmp_path: Path, content: str) -> None:
    """An index that is not one is refused, even where a single file would do."""
    folder = make(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(content, encoding="latin-1")
    assert "model.safetensors.index.json" in refusal(folder)


@pytest.mark.parametrize("lost", [(1,), (3,), (1, 2)], ids=str)
def test_missing_shards_are_named(tmp_path: Path, lost: tuple[int, ...]) -> None:
    """Every shard that is not there is named, once, and not all its tensors too."""
    folder = make(tmp_path / "model", shards=3)
    files = [f"model-{at:05d}-of-00003.safetensors" for at in lost]
    for file in files:
        (folder / file).unlink()
    text = refusal(folder)
    assert f"{len(lost)} missing files: {', '.join(files)}" in text
    assert "missing tensors" not in text


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_cut_off_files_are_refused(tmp_path_factory: Any, data: st.DataObject) -> None:
    """A file cut off anywhere, or with bytes behind its end, is refused by name, next to what else is wrong."""
    shards = data.draw(st.sampled_from([1, 2]))
    folder = make(tmp_path_factory.mktemp("model"), shards=shards)
    file = "model.safetensors" if shards == 1 else "model-00002-of-00002.safetensors"
    whole = (folder / file).read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    places = st.one_of(st.integers(0, len(whole) - 1), st.sampled_from([0, 7, 8, header - 1, header, header + 1]))
    size = data.draw(places | st.just(len(whole) + 1))
    (folder / file).write_bytes((whole + b"\0")[:size])
    if shards == 2:
        (folder / "model-00001-of-00002.safetensors").unlink()
    text = refusal(folder)
    assert f"1 unreadable files (damaged or cut off): {file}" in text
    assert ("1 missing files" in text) == (shards == 2)


@settings(max_examples=25, deadline=None)
@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_damaged_headers_never_load_in_silence(tmp_path_factory: Any, at: int, flip: int) -> None:
    """One changed byte in a header either changes nothing that is read, or makes loading fail with a clear error."""
    folder = make(tmp_path_factory.mktemp("model"))
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[at % (8 + struct.unpack("<Q", raw[:8])[0])] ^= flip
    path.write_bytes(raw)
    try:
        config, params = read_checkpoint(folder)
    except CheckpointError:
        return
    official = official_tensors(config, params)
    assert official.keys() == TENSORS.keys()
    # Two names of one shape may have been exchanged for each other only by two changes.
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in official.items())


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b"\0" * 64, b"{}"], ids=str)
def test_garbage_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file that is no safetensors file at all is refused by name."""
    folder = make(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refusal(folder)


def test_missing_folder_and_config_are_refused(tmp_path: Path) -> None:
    """No folder, no config, or a config that is not JSON: all are checkpoint errors that name the file."""
    assert "config.json" in refusal(tmp_path / "nowhere")
    folder = make(tmp_path / "model")
    (folder / "config.json").write_text("{")
    assert "config.json" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(TINY | {"model_type": "deepseek_v3"}))
    with pytest.raises(ConfigError, match="deepseek_v3"):
        read_checkpoint(folder)


@pytest.mark.parametrize("row", [[0, 0], [-1, 1], [2, 3], [7, 7]], ids=str)
def test_expert_tables_must_hold_distinct_experts(tmp_path: Path, row: list[int]) -> None:
    """A table row with an id out of range or twice the same is refused, with the row."""
    table = TENSORS["layers.0.ffn.gate.tid2eid"].clone()
    table[5] = torch.tensor(row)
    text = refusal(make(tmp_path / "model", TENSORS | {"layers.0.ffn.gate.tid2eid": table}))
    assert "layers.0.ffn.gate.tid2eid (1 rows, first row 5" in text
    assert str(row) in text
    assert "0..2" in text


def test_params_must_fit_the_config(tmp_path: Path) -> None:
    """Weights that do not belong to the config are refused by name before anything is written."""
    config, params = read_checkpoint(make(tmp_path / "source"))
    for other in (
        attrs.evolve(config, compress_ratios=(0, 128, 128, 4)),
        attrs.evolve(config, compress_ratios=(4, 4, 128, 4)),
        attrs.evolve(config, num_hash_layers=0),
    ):
        with pytest.raises(ShapeError, match=r"layers\.\d\."):
            write_checkpoint(tmp_path / "out", other, params)
    with pytest.raises(ShapeError, match=r"embed: expected \(24, 16\), got \(3, 16\)"):
        official_tensors(config, attrs.evolve(params, embed=params.embed[:3]))
    with pytest.raises(ConfigError, match="compress_ratios"):
        write_checkpoint(tmp_path / "out", attrs.evolve(config, compress_ratios=(0, 8, 128, 4)), params)
    with pytest.raises(ConfigError, match="max_shard_bytes"):
        write_checkpoint(tmp_path / "out", config, params, max_shard_bytes=0)
    with pytest.raises(DtypeError, match="float64"):
        write_checkpoint(tmp_path / "out", config, params, dtype=torch.float64)
    assert not (tmp_path / "out").exists()


def test_writing_replaces_what_was_there(tmp_path: Path) -> None:
    """A second checkpoint in a folder replaces the first, in any number of files, and leaves other files alone."""
    config, params = read_checkpoint(make(tmp_path / "source"))
    other = init_params(config, torch.Generator().manual_seed(1), torch.float32)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    for written, limit in ((params, None), (other, 20_000), (params, 8_000), (other, None)):
        write_checkpoint(tmp_path / "out", config, written, max_shard_bytes=limit)
        assert_same(read_checkpoint(tmp_path / "out")[1], written)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_failed_writing_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """If writing fails, what was there before is whole and nothing is left behind."""
    config, params = read_checkpoint(make(tmp_path / "out"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    without_memory = attrs.evolve(params, head=params.head.to("meta"))
    with pytest.raises(NotImplementedError):
        write_checkpoint(tmp_path / "out", config, without_memory, max_shard_bytes=10_000)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_weights_in_training_and_tied_weights_are_written(tmp_path: Path) -> None:
    """Weights that require gradients, or that are one tensor under two names, are written as they are."""
    config, params = read_checkpoint(make(tmp_path / "source"))
    tied = attrs.evolve(params, head=params.embed.requires_grad_())
    write_checkpoint(tmp_path / "out", config, tied)
    assert torch.equal(read_checkpoint(tmp_path / "out")[1].head, TENSORS["embed.weight"])


@settings(max_examples=15, deadline=None)
@given(raw=configs(), seed=st.integers(0, 99), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_initial_weights_fit_and_repeat(raw: dict[str, Any], seed: int, dtype: torch.dtype) -> None:
    """Initial weights have every tensor in its type, are equal for equal seeds, and leave global randomness alone."""
    config = config_from_dict(raw)
    before = torch.get_rng_state()
    first, second = (init_params(config, torch.Generator().manual_seed(seed), dtype) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(first, second)
    leaves = leaves_from_params(first)
    for path, (shape, kind) in leaf_shapes(config).items():
        assert tuple(leaves[path].shape) == shape
        assert leaves[path].dtype == {"f32": torch.float32, "ids": torch.int64}.get(kind, dtype)
    for layer in range(config.num_hash_layers):
        table = leaves[f"layers.{layer}.ffn.tid2eid"].sort(dim=1).values
        assert bool((table[:, 1:] != table[:, :-1]).all())
        assert 0 <= int(table.min()) <= int(table.max()) < config.n_routed_experts


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_initial_mixes_are_a_plain_residual(streams: int) -> None:
    """At first a sublayer reads the mean of the streams, its output is added to each, and each is kept to itself."""
    config = config_from_dict(tiny_config(streams=streams))
    params = init_params(config, torch.Generator().manual_seed(0), torch.float32)
    for mix in (params.layers[0].hc_attn, params.layers[-1].hc_ffn):
        pre, post, comb = mix.base.split([streams, streams, streams * streams])
        assert torch.allclose(pre.sigmoid(), torch.full((streams,), 1 / streams), atol=1e-3)
        assert torch.allclose(2 * post.sigmoid(), torch.ones(streams))
        kept = comb.view(streams, streams).softmax(dim=1)
        assert torch.allclose(kept, kept.T)  # doubly stochastic, so equal streams stay equal
        assert bool((kept.diagonal() > 0.9).all())
        assert float(mix.scale.max()) < 0.05
    head = params.hc_head.base.sigmoid()
    assert torch.allclose(head, torch.full((streams,), 1 / streams), atol=1e-3)


def test_initial_matrices_have_the_usual_deviation() -> None:
    """Matrices have deviation 0.02 about zero, norms are one, sinks and biases zero."""
    config = config_from_dict(tiny_config(vocab=500))
    leaves = leaves_from_params(init_params(config, torch.Generator().manual_seed(0), torch.float32))
    for path in ("embed", "head", "layers.1.ffn.w13", "layers.1.attn.wq_b", "layers.1.hc_ffn.fn"):
        assert abs(float(leaves[path].std()) - 0.02) < 0.002
        assert abs(float(leaves[path].mean())) < 0.002
    assert bool((leaves["layers.1.attn.kv_norm"] == 1).all())
    for path in ("attn.attn_sink", "attn.compressor.ape", "ffn.bias"):
        assert bool((leaves[f"layers.1.{path}"] == 0).all())


def test_paths_name_the_fields_of_params() -> None:
    """``Params`` is taken apart and put together again without loss; a path is the way to its field."""
    config = config_from_dict(tiny_config((4,) * 11, hash_layers=1))
    params = init_params(config, torch.Generator().manual_seed(0), torch.float32)
    leaves = leaves_from_params(params)
    assert leaves["layers.10.attn.indexer.compressor.wkv"] is params.layers[10].attn.indexer.compressor.wkv
    assert leaves.keys() == leaf_shapes(config).keys()
    assert_same(params_from_leaves(leaves), params)
    assert params.layers[0].ffn.bias is None
    assert params.layers[1].ffn.tid2eid is None
