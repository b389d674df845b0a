"""Writing checkpoints as a stream: forms and names change, numbers do not, and an interruption costs nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import kit.checkpoints as kit
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.configs import configs, tiny_config
from kit.steps import examples
from purestep.model.checkpoint import official_tensors, read_checkpoint
from purestep.model.draft import read_draft
from purestep.model.layout import draft_pieces, tensor_pieces
from purestep.model.leaves import expanded, leaves_from_params
from purestep.model.loading import load_model
from purestep.model.random_source import RandomSource
from purestep.model.sources import folder_source, sliced_source
from purestep.model.storage import FORMS, TYPES, Storage, cells_of
from purestep.model.streaming import WRITING_FILE, stream_checkpoint
from purestep.state.config import Config
from purestep.state.config_reading import config_from_dict
from purestep.state.errors import CheckpointError, ConfigError
from purestep.state.released import RELEASED, family_of
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import FineGrainedFP8Config

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

RAW = tiny_config((0, 4, 128), hidden=32, inter=128, vocab=24, experts=3, torch_dtype="bfloat16")


def source_folder(folder: Path, form: str | Storage = "fp4", raw: Any = RAW, seed: int = 0, shards: int = 2) -> Path:
    """Write a checkpoint the plain way, with a draft block."""
    tensors = kit.stored_tensors(raw, kit.random_tensors(raw, seed, torch.bfloat16, mtp=True), form)
    return kit.write_checkpoint(folder, raw, tensors, shards)


def file_tensors(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of every file."""
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Compare tensors by name bit for bit, types included."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor.contiguous().view(torch.uint8), right[name].contiguous().view(torch.uint8)), name


def assert_sums(folder: Path) -> None:
    """Compare the checksums that were written with the files, all of them."""
    lines = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert lines.keys() == {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
    for name, checksum in lines.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == checksum


@given(raw=configs(max_layers=2), form=st.sampled_from([*FORMS, "mixed"]), limit=st.sampled_from([1, 30_000, 10**9]))
@examples(8)
def test_a_copy_is_the_same_tensors(tmp_path_factory: Any, raw: dict[str, Any], form: str, limit: int) -> None:
    """Converting to the form that it has gives every tensor bit for bit, draft block included, in files of the size."""
    storage = Storage(linear="fp8", expert="wide") if form == "mixed" else FORMS[form]
    raw |= {"torch_dtype": "float32" if storage.wide == "F32" else "bfloat16"}
    folder = source_folder(tmp_path_factory.mktemp("model"), storage, raw)
    found = folder_source(folder)
    assert found.storage == storage
    out = folder / "out"
    stream_checkpoint(out, found, storage, max_shard_bytes=limit)
    assert_same(file_tensors(out), file_tensors(folder))
    assert_sums(out)
    for path in out.glob("*.safetensors"):
        sizes = [tensor.nbytes for tensor in load_file(path).values()]
        assert len(sizes) <= 2 or sum(sizes) <= limit
    read_checkpoint(out)
    read_draft(out)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dialect", ["official", "modules"])
def test_names_change_nothing(tmp_path: Path, form: str, dialect: Any) -> None:
    """To transformers' names and back every tensor has its bits again; the draft block goes where it has names."""
    folder = source_folder(tmp_path / "source", form, RAW | {"torch_dtype": "float32" if form == "f32" else "bfloat16"})
    stream_checkpoint(tmp_path / "there", folder_source(folder), FORMS[form], dialect=dialect, max_shard_bytes=50_000)
    stream_checkpoint(tmp_path / "back", folder_source(tmp_path / "there"), FORMS[form])
    expected = file_tensors(folder)
    if dialect == "modules":
        expected = {name: tensor for name, tensor in expected.items() if not name.startswith("mtp.")}
        assert any("gate_up_proj" in name for name in file_tensors(tmp_path / "there"))
    assert_same(file_tensors(tmp_path / "back"), expected)
    config, params = read_checkpoint(tmp_path / "there")
    assert_same(official_tensors(config, params), official_tensors(*read_checkpoint(folder)))


@pytest.mark.parametrize(("given_form", "form"), [("fp4", "bf16"), ("fp4", "f32"), ("fp4", "fp8"), ("fp8", "bf16")])
def test_widening_forms_keep_every_number(tmp_path: Path, given_form: str, form: str) -> None:
    """From FP4 to FP8 and from either to floats no number changes, nor does any logit."""
    folder = source_folder(tmp_path / "source", given_form)
    stream_checkpoint(tmp_path / "out", folder_source(folder), FORMS[form])
    (config, before), (_, after) = (read_checkpoint(path, dtype=torch.float32) for path in (folder, tmp_path / "out"))
    assert_same(leaves_from_params(before), leaves_from_params(after))
    same = [expanded(read_draft(path), torch.float32) for path in (folder, tmp_path / "out")]
    for mine, theirs in zip(*(leaves_from_params(draft).values() for draft in same), strict=True):
        assert torch.equal(mine.float(), theirs.float())
    ids = torch.arange(40) % config.vocab_size
    logits = [ps.forward_sequence(load_model(path, dtype="float32"), ids) for path in (folder, tmp_path / "out")]
    assert torch.equal(*logits)


@pytest.mark.parametrize("form", ["fp4", "fp8"])
def test_quantising_again_changes_nothing(tmp_path: Path, form: str) -> None:
    """Numbers that came from a form go back into it unchanged: fp4 to bf16 to fp4 has the same numbers."""
    folder = source_folder(tmp_path / "source", form)
    stream_checkpoint(tmp_path / "wide", folder_source(folder), FORMS["bf16"])
    stream_checkpoint(tmp_path / "again", folder_source(tmp_path / "wide"), FORMS[form])
    (_, before), (_, after) = (read_checkpoint(path, dtype=torch.float32) for path in (folder, tmp_path / "again"))
    assert_same(leaves_from_params(before), leaves_from_params(after))
    label = json.loads((tmp_path / "again" / "config.json").read_text())
    assert label["expert_dtype"] == form
    assert label["num_nextn_predict_layers"] == 1
    assert label["compress_ratios"] == [0, 4, 128, 0]
    assert ("scale_fmt" in label["quantization_config"]) == (form == "fp4")


def test_numbers_that_cannot_be_quantised_are_named(tmp_path: Path) -> None:
    """Infinity and NaN have no place in FP4 and FP8: the weight is named."""
    tensors = kit.random_tensors(RAW, 0, torch.bfloat16)
    tensors["layers.1.ffn.experts.2.w1.weight"][3, 3] = torch.inf
    folder = kit.write_checkpoint(tmp_path / "source", RAW, tensors)
    with pytest.raises(CheckpointError, match=r"layers\.1\.ffn\.experts\.2\.w1\.weight: expected finite numbers"):
        stream_checkpoint(tmp_path / "out", folder_source(folder), FORMS["fp4"])


def test_blocks_across_names_are_refused(tmp_path: Path) -> None:
    """Gate and up projection of FP8 experts cannot share a tensor unless a block ends between them."""
    raw = RAW | {"moe_intermediate_size": 20}
    folder = source_folder(tmp_path / "source", "fp8", raw)
    with pytest.raises(ConfigError, match=r"moe_intermediate_size: expected a multiple of 128.*got 20"):
        stream_checkpoint(tmp_path / "out", folder_source(folder), FORMS["fp8"], dialect="modules")
    assert not (tmp_path / "out").exists()
    stream_checkpoint(tmp_path / "fp4", folder_source(folder), FORMS["fp4"], dialect="modules")
    read_checkpoint(tmp_path / "fp4")


@given(stop=st.integers(0, 60), seed=st.integers(0, 3))
@examples(8)
def test_an_interrupted_writing_goes_on(tmp_path_factory: Any, stop: int, seed: int) -> None:
    """Wherever it was interrupted, the second call writes what was missing, and the result has the same bytes."""
    folder = source_folder(tmp_path_factory.mktemp("model"), seed=seed)
    whole, parts = folder / "whole", folder / "parts"
    stream_checkpoint(whole, folder_source(folder), FORMS["bf16"], max_shard_bytes=60_000)
    calls = 0

    def interrupt(done: int, total: int, name: str) -> None:
        nonlocal calls
        calls += 1
        if calls > stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream_checkpoint(parts, folder_source(folder), FORMS["bf16"], max_shard_bytes=60_000, progress=interrupt)
    assert not (parts / "config.json").exists()
    complete = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.safetensors")}
    told: list[tuple[int, int]] = []
    stream_checkpoint(
        parts,
        folder_source(folder),
        FORMS["bf16"],
        max_shard_bytes=60_000,
        progress=lambda a, b, _: told.append((a, b)),
    )
    assert {path.name: path.read_bytes() for path in parts.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }
    assert all((parts / name).stat().st_mtime_ns == time for name, time in complete.items())
    assert [a for a, _ in told] == sorted(a for a, _ in told)
    assert told[-1][0] == told[-1][1]


def test_a_writing_goes_on_only_with_the_same(tmp_path: Path) -> None:
    """Other arguments, another source, changed files or a folder with something in it are refused."""
    folder = source_folder(tmp_path / "source")

    def interrupt(done: int, total: int, name: str) -> None:
        if "model-00003" in name:
            raise KeyboardInterrupt

    def begin(out: Path) -> None:
        shutil.rmtree(out, ignore_errors=True)
        with pytest.raises(KeyboardInterrupt):
            stream_checkpoint(out, folder_source(folder), FORMS["bf16"], max_shard_bytes=60_000, progress=interrupt)

    out = tmp_path / "out"
    begin(out)
    with pytest.raises(CheckpointError, match="another conversion"):
        stream_checkpoint(out, folder_source(folder), FORMS["fp8"], max_shard_bytes=60_000)
    other = source_folder(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="another conversion"):
        stream_checkpoint(out, folder_source(other), FORMS["bf16"], max_shard_bytes=60_000)
    first = next(path for path in sorted(out.glob("*.safetensors")))
    first.write_bytes(first.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match=f"{first.name}: expected the file that was written"):
        stream_checkpoint(out, folder_source(folder), FORMS["bf16"], max_shard_bytes=60_000)
    (out / WRITING_FILE).unlink()
    with pytest.raises(CheckpointError, match="expected an empty folder"):
        stream_checkpoint(out, folder_source(folder), FORMS["bf16"], max_shard_bytes=60_000)


@pytest.mark.parametrize(
    ("form", "dialect"), [("fp4", "official"), ("fp8", "official"), ("bf16", "official"), ("bf16", "modules")]
)
def test_transformers_reads_what_is_converted(tmp_path: Path, form: str, dialect: Any) -> None:
    """transformers loads a converted folder with nothing missing, and has our logits.

    On a CPU it expands stored weights, and only under official names.
    """
    raw = tiny_config((0, 4, 128), hidden=128, inter=128, q_lora=128, o_lora=128, experts=2, topk=2, vocab=24)
    folder = source_folder(tmp_path / "source", "f32", raw | {"index_topk": 512})
    out = tmp_path / "out"
    stream_checkpoint(out, folder_source(folder), FORMS[form], dialect=dialect, max_shard_bytes=300_000)
    extra = {} if form == "bf16" else {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    peer, info = DeepseekV4ForCausalLM.from_pretrained(
        out,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        **extra,
    )
    assert not any(info[kind] for kind in ("missing_keys", "mismatched_keys"))
    assert all("mtp" in name for name in info["unexpected_keys"])
    model = load_model(out, dtype="float32")
    ids = [(5 * i * i + i) % 24 for i in range(60)]
    mine = ps.forward_sequence(model, torch.tensor(ids))
    torch.testing.assert_close(mine, kit.peer_logits(peer, ids), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("form", ["fp4", "fp8"])
def test_stored_module_names_are_those_of_transformers(tmp_path: Path, form: str) -> None:
    """What is written under module names are the parameters of transformers' model with stored weights, all of them."""
    raw = tiny_config((0, 4, 128), hidden=160, inter=128, q_lora=128, o_lora=136, experts=2, vocab=24, mtp_entry=True)
    source = RandomSource(config=config_from_dict(raw), has_draft=False, storage=FORMS[form], seed=0)
    stream_checkpoint(tmp_path, source, FORMS[form], dialect="modules")
    config = kit.to_transformers_config(raw)
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config)
    label = FineGrainedFP8Config(scale_fmt="ue8m0" if form == "fp4" else "float", expert_dtype=form)
    mine = file_tensors(tmp_path)
    kept = [name.removesuffix(".weight") for name, tensor in mine.items() if tensor.dtype is torch.bfloat16]
    stored = replace_with_fp8_linear(model, kept, label, pre_quantized=True).state_dict()
    assert mine.keys() == stored.keys()
    for name, tensor in mine.items():
        assert tensor.shape == stored[name].shape, name
        assert tensor.dtype == stored[name].dtype or tensor.dtype in (torch.bfloat16, torch.float32), name


@pytest.mark.parametrize("form", FORMS)
def test_random_checkpoints_run(tmp_path: Path, form: str) -> None:
    """A random toy in any form loads, and its logits have a useful size and depend on its seed alone."""
    logits = []
    for at, seed in enumerate((0, 0, 1)):
        source = RandomSource(config=RELEASED["toy"], has_draft=True, storage=FORMS[form], seed=seed)
        stream_checkpoint(tmp_path / str(at), source, FORMS[form], max_shard_bytes=100_000 if at else 10**9)
        model = load_model(tmp_path / str(at), dtype="float32", stored=True)
        read_draft(tmp_path / str(at))
        logits.append(ps.forward_sequence(model, torch.arange(64)))
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert 0.5 < float(logits[0].std()) < 8


@given(
    layers=st.sets(st.integers(0, 2), min_size=1),
    experts=st.integers(2, 3),
    vocab=st.sampled_from([10, 24]),
    form=st.sampled_from(["fp4", "bf16"]),
)
@examples(8)
def test_slices_are_parts(tmp_path_factory: Any, layers: set[int], experts: int, vocab: int, form: str) -> None:
    """A slice has the chosen layers, first experts and first tokens, bit for bit, and routes to experts that it has."""
    folder = source_folder(tmp_path_factory.mktemp("model"), form, RAW | {"num_hash_layers": 2})
    chosen = sorted(layers)
    part = sliced_source(folder_source(folder), layers=chosen, experts=experts, vocab=vocab)
    stream_checkpoint(folder / "out", part, FORMS[form])
    config, params = read_checkpoint(folder / "out")
    assert (config.num_hidden_layers, config.n_routed_experts, config.vocab_size) == (len(chosen), experts, vocab)
    whole = file_tensors(folder)
    for name, tensor in official_tensors(config, params).items():
        _, _, rest = name.partition(".")
        layer, _, leaf = rest.partition(".")
        original = whole[f"layers.{chosen[int(layer)]}.{leaf}" if name.startswith("layers.") else name]
        if name.endswith("tid2eid"):
            fits = (original[:vocab] < experts).all(-1)
            assert torch.equal(tensor[fits], original[:vocab][fits])
        else:
            cut = original[: tensor.shape[0]]
            assert torch.equal(tensor.contiguous().view(torch.uint8), cut.contiguous().view(torch.uint8)), name
    model = load_model(folder / "out", dtype="float32")
    assert bool(ps.forward_sequence(model, torch.arange(vocab)).isfinite().all())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": (3,)}, r"layers: expected some of the layers 0\.\.2"),
        ({"experts": 1}, r"experts: expected 2 to 3, got 1"),
        ({"experts": 4}, r"experts: expected 2 to 3, got 4"),
        ({"vocab": 25}, r"vocab: expected 2 to 24, got 25"),
        ({"vocab": 1}, r"vocab: expected 2 to 24, got 1"),
    ],
    ids=str,
)
def test_slices_must_be_parts(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """What is not there cannot be kept."""
    found = folder_source(source_folder(tmp_path / "source"))
    with pytest.raises(ConfigError, match=words):
        sliced_source(found, **({"layers": None, "experts": None, "vocab": None} | change))


def inventory(config: Config, storage: Storage) -> list[tuple[str, int]]:
    """List name and bytes of every tensor of a checkpoint."""
    pieces = (*tensor_pieces(config), *draft_pieces(config))
    cells = (cell for piece in pieces for cell in cells_of(piece, storage))
    return [(cell.name, torch.Size(cell.shape).numel() * TYPES[cell.type].itemsize) for cell in cells]


@pytest.mark.parametrize(
    ("name", "form", "n_tensors", "n_bytes"),
    [
        ("flash", "fp4", 69_187, 159_609_485_896),
        ("pro", "fp4", 145_116, 864_704_792_696),
        ("flash", "fp8", 69_187, 292_555_345_480),
        ("pro", "fp8", 145_116, 1_602_325_824_632),
    ],
)
def test_inventories_are_those_of_the_releases(name: str, form: str, n_tensors: int, n_bytes: int) -> None:
    """From the configuration alone: tensors and bytes of Flash and Pro, and the arithmetic of the -Base forms."""
    found = inventory(RELEASED[name], FORMS[form])
    assert len({name for name, _ in found}) == len(found) == n_tensors
    assert sum(size for _, size in found) == n_bytes


def test_families_are_told_by_their_widths() -> None:
    """Flash and Pro are told by widths, whether or not they have all their layers."""
    assert family_of(RELEASED["pro"]) == "DeepSeek-V4-Pro"
    part = attrs.evolve(RELEASED["flash"], num_hidden_layers=1, compress_ratios=(4,))
    assert family_of(part) == "DeepSeek-V4-Flash, some of its layers"
    assert family_of(config_from_dict(RAW)) == "DeepSeek-V4, of other widths"
