"""Choosing Ascend kernels when a model is loaded: what is refused, what falls back, what is imported."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import purestep as ps
import pytest
import torch
from kit.ascend import A5_SIZES, SIZES, machine_for
from kit.configs import tiny_config
from kit.steps import ENDLESS, ids_of
from kit.twins import TOLERANCE, row_errors
from purestep.step.tiny_checkpoints import random_tensors, write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny checkpoint in bfloat16."""
    config = tiny_config((0, 4, 128), torch_dtype="bfloat16", **SIZES)
    write_checkpoint(tmp_path, config, random_tensors(config, 0, torch.bfloat16))
    return tmp_path


def logits_of(model: ps.Model) -> torch.Tensor:
    """Feed a prompt and decode twice: f32[T,V]."""
    state = ps.init_state(model, ps.Capacity(requests=1, tokens=256, context=256), page_size=64)
    state, a = ps.open_request(state, ENDLESS)
    state, out = ps.extend_step(model, state, {a: ids_of(130)}, sample=False, logits="all")
    found = [out.logits]
    for token in (3, 4):
        state, out = ps.decode_step(model, state, force={a: token})
        found.append(out.logits)
    return torch.cat(found)


def test_kernels_are_chosen_by_name(folder: Path) -> None:
    """With kernels="ascend" the model runs on what is registered, without a warning, and equals the plain model."""
    with machine_for():
        model = ps.load_model(folder, kernels="ascend", chip="a3")
        assert (model.ops.name, model.cache_form, model.numerics) == ("ascend", "ascend", ps.Numerics.ascend())
        plain = ps.load_model(folder, kernels="reference", numerics=ps.Numerics.ascend())
        assert float(row_errors(logits_of(model), logits_of(plain)).max()) < TOLERANCE


@pytest.mark.parametrize("missing", ["custom::npu_hc_post", "npu::compressor"])
def test_missing_operators_fall_back_with_one_warning(folder: Path, missing: str) -> None:
    """An operator that is not in this build is replaced by the plain one, with one warning and the same result."""
    with machine_for(without=(missing,)):
        with pytest.warns(UserWarning, match="no installed package") as caught:
            model = ps.load_model(folder, kernels="ascend", chip="a3")
        assert len(caught) == 1
        assert model.cache_form == ("plain" if missing == "npu::compressor" else "ascend")
        plain = ps.load_model(folder, kernels="reference", numerics=ps.Numerics.ascend())
        assert float(row_errors(logits_of(model), logits_of(plain)).max()) < TOLERANCE


def test_int8_weights_need_their_kernels(folder: Path) -> None:
    """Int8 weights are refused where a kernel for them is missing, and with plain kernels; else they are loaded."""
    numerics = ps.Numerics.ascend(int8_weights=True)
    with machine_for():
        model = ps.load_model(folder, kernels="ascend", chip="a3", numerics=numerics)
        assert model.params.layers[0].attn.wq_a.codes.dtype is torch.int8
        assert model.params.layers[1].ffn.w13.codes.dtype is torch.int8
        assert logits_of(model).isfinite().all()
        with pytest.raises(ps.ConfigError, match="int8 weights and MX blocks need Ascend kernels"):
            ps.load_model(folder, numerics=numerics)
    with machine_for(without=("npu::npu_quant_matmul",)):
        ps.load_model(folder, kernels="ascend", chip="a3")
        with pytest.raises(ps.ConfigError, match=r"int8 weights, missing are .*quantised_linear"):
            ps.load_model(folder, kernels="ascend", chip="a3", numerics=numerics)


@pytest.fixture
def a5_folder(tmp_path: Path) -> Path:
    """A tiny checkpoint in bfloat16 with groups as wide as the A5's kernels take."""
    config = tiny_config((0, 4, 128), torch_dtype="bfloat16", **A5_SIZES)
    write_checkpoint(tmp_path, config, random_tensors(config, 0, torch.bfloat16))
    return tmp_path


def test_the_a5_is_chosen_by_name(a5_folder: Path) -> None:
    """With chip="a5" the model has packed caches, its own numerics and the grouped weight in MX blocks."""
    with machine_for(chip="a5"), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = ps.load_model(a5_folder, kernels="ascend", chip="a5")
        assert (model.cache_form, model.cache_forms, model.numerics) == ("packed", ("packed",), ps.Numerics.ascend_a5())
        assert model.params.layers[0].attn.wo_a.codes.dtype is torch.float8_e4m3fn
        assert model.params.layers[0].ffn.w13.dtype is torch.bfloat16
        state = ps.init_state(model, ps.Capacity(requests=1, tokens=128, context=128), page_size=64)
        kinds = {name: state.kv.handle.spec(name)[1] for name in state.kv.handle.names}
        assert kinds["swa"] is kinds["c4"] is kinds["c128"] is kinds["index"] is torch.uint8
        assert kinds["index_scale"] is torch.float32
        assert state.kv.dtype is torch.bfloat16
        assert logits_of(model).isfinite().all()
        blocks = ps.load_model(a5_folder, kernels="ascend", chip="a5", numerics=ps.Numerics.ascend_a5(mx_experts=True))
        assert blocks.params.layers[1].ffn.w2.codes.dtype is torch.float8_e4m3fn
        for numerics in (ps.Numerics.ascend(), ps.Numerics.ascend(int8_weights=True)):
            with pytest.raises(ps.ConfigError, match=r"numerics: expected Numerics.ascend_a5\(\)"):
                ps.load_model(a5_folder, kernels="ascend", chip="a5", numerics=numerics)
    with machine_for(), pytest.raises(ps.ConfigError, match=r"numerics: expected Numerics.ascend\(\)"):
        ps.load_model(a5_folder, kernels="ascend", chip="a3", numerics=ps.Numerics.ascend_a5())
    for numerics in (ps.Numerics.ascend_a5(mx_output=False, mx_experts=True), ps.Numerics.ascend_a5()):
        with pytest.raises(ps.ConfigError, match="MX blocks need Ascend kernels"):
            ps.load_model(a5_folder, numerics=numerics)


def test_blocks_need_their_kernels(a5_folder: Path) -> None:
    """Where the kernels of MX blocks are missing, the default does without, and asking for them is refused."""
    with machine_for(chip="a5", without=("npu::npu_dynamic_mx_quant",)):
        with pytest.warns(UserWarning, match="no installed package has Ascend kernels for grouped_linear"):
            model = ps.load_model(a5_folder, kernels="ascend", chip="a5")
        assert model.numerics == ps.Numerics.ascend_a5(mx_output=False)
        assert logits_of(model).isfinite().all()
        for field in ("mx_output", "mx_experts"):
            asked = ps.Numerics.ascend_a5(**{"mx_output": False, field: True})
            with (
                pytest.warns(UserWarning, match="grouped_linear"),
                pytest.raises(ps.ConfigError, match=f"missing are .*quantize_groups.*leave {field} out"),
            ):
                ps.load_model(a5_folder, kernels="ascend", chip="a5", numerics=asked)


def test_groups_that_the_a5_does_not_take(folder: Path) -> None:
    """Groups of another width than a multiple of 64 are refused, and the error says how to load without blocks."""
    with machine_for(chip="a5"):
        with pytest.raises(ps.ConfigError, match=r"multiple of 64 channels, got 32; load with .*mx_output=False"):
            ps.load_model(folder, kernels="ascend", chip="a5")
        model = ps.load_model(folder, kernels="ascend", chip="a5", numerics=ps.Numerics.ascend_a5(mx_output=False))
        assert logits_of(model).isfinite().all()


def test_settings_that_do_not_go_together(folder: Path) -> None:
    """A chip without Ascend kernels, these without a chip, another dtype or other numerics are refused by name."""
    with machine_for():
        with pytest.raises(ps.ConfigError, match=r"chip: expected None.*'a3'"):
            ps.load_model(folder, chip="a3")
        with pytest.raises(ps.ConfigError, match="chip: expected a2, a3 or a5"):
            ps.load_model(folder, kernels="ascend")
        with pytest.raises(ps.ConfigError, match="chip: expected one of a2, a3, a5, got 'a4'"):
            ps.load_model(folder, kernels="ascend", chip="a4")
        with pytest.raises(ps.ConfigError, match=r"dtype: expected torch\.bfloat16"):
            ps.load_model(folder, kernels="ascend", chip="a3", dtype="float32")
        with pytest.raises(ps.ConfigError, match="numerics"):
            ps.load_model(folder, kernels="ascend", chip="a3", numerics=ps.Numerics(invariant=True))


def test_without_packages_the_error_says_what_to_install(folder: Path) -> None:
    """Asking for Ascend kernels where nothing is registered names the packages."""
    with pytest.raises(ps.ConfigError, match=r"install torch-npu, sgl-kernel-npu and custom_ops"):
        ps.load_model(folder, kernels="ascend", chip="a3")


def test_another_schema_is_refused(folder: Path) -> None:
    """A live schema that is not the recorded one stops the load and both are named."""
    changed = "custom::npu_hc_post(Tensor residual, Tensor x, Tensor post, Tensor comb) -> Tensor"
    with (
        machine_for(instead={"custom::npu_hc_post": changed}),
        pytest.raises(ps.ConfigError) as caught,
    ):
        ps.load_model(folder, kernels="ascend", chip="a3")
    assert "Tensor residual, Tensor x" in str(caught.value)
    assert "Tensor x, Tensor residual" in str(caught.value)


def test_streams_of_another_number_are_refused(tmp_path: Path) -> None:
    """The kernels of mHC take four streams: another model is refused when it is loaded."""
    config = tiny_config((0,), torch_dtype="bfloat16", **(SIZES | {"streams": 2}))
    write_checkpoint(tmp_path, config, random_tensors(config, 0, torch.bfloat16))
    with machine_for(), pytest.raises(ps.ConfigError, match="hc_mult: expected 4"):
        ps.load_model(tmp_path, kernels="ascend", chip="a3")


def test_weights_are_kept_as_the_kernels_want_them(folder: Path) -> None:
    """The grouped weight is stored so that the kernel's form of it costs no copy; its values are the plain model's."""
    with machine_for():
        model = ps.load_model(folder, kernels="ascend", chip="a3")
        plain = ps.load_model(folder, kernels="reference", numerics=ps.Numerics.ascend())
    for own, other in zip(model.params.layers, plain.params.layers, strict=True):
        assert own.attn.wo_a.transpose(1, 2).is_contiguous()
        assert torch.equal(own.attn.wo_a.flatten(0, 1), other.attn.wo_a)
        if own.attn.compressor:
            assert own.attn.compressor.wkv.dtype is torch.bfloat16
            assert torch.equal(own.attn.compressor.wkv.float(), other.attn.compressor.wkv)


def test_nothing_is_imported_unless_asked_for() -> None:
    """Importing the package, loading and stepping a model import no module of ops/ascend and no kernel package."""
    code = (
        "import sys, purestep as ps\n"
        "model = ps.load_model('tiny')\n"
        "state = ps.init_state(model, ps.Capacity(requests=1, tokens=128, context=64))\n"
        "state, a = ps.open_request(state)\n"
        "ps.extend_step(model, state, {a: [1, 2]})\n"
        "found = [m for m in sys.modules if m.startswith('purestep.ops.ascend') or m in ('torch_npu', 'custom_ops')]\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_default_kernels_do_not_look_for_a_device(folder: Path) -> None:
    """Even where Ascend operators are registered, a model that does not ask for them runs on plain ones."""
    with machine_for(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ps.load_model(folder).ops.name in ("fused", "reference")
