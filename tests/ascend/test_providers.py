"""The provider table: complete, bound to the recorded schemas, chosen from what is registered, strict about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from ascend_sim.simulator import PACKAGES, simulate
from purestep.ops.ascend.providers import (
    BINDINGS,
    CHIPS,
    Binding,
    Providers,
    choose_providers,
    import_packages,
    installed_schemas,
)
from purestep.ops.ascend.schemas import load_schemas, parse_text

BF16 = torch.bfloat16
RELEASES = ["2.10.0", "2.10.0.post4", "2.13.0", "2.14.0"]
KERNELS = [b for b in BINDINGS if b.name]
IDS = [f"{b.operator}-{b.qualified_name}-{'+'.join(b.chips)}" for b in KERNELS]
EVERY = ("torch-npu", "cann-recipes", "sgl-kernel-npu", "vllm-ascend")


def chosen(chip: str = "a3", *, strict: bool = False, **machine: Any) -> Providers:
    """Choose on a simulated machine."""
    with simulate(chip=chip, **machine):
        return choose_providers(chip, installed_schemas(), strict=strict)


@pytest.mark.parametrize("binding", KERNELS, ids=IDS)
def test_bindings_name_what_the_schemas_have(binding: Binding) -> None:
    """Every binding names a recorded, usable operator of its package and chips, and only arguments that it has."""
    records = [
        r for r in load_schemas() if (r.provider, r.qualified_name) == (binding.provider, binding.qualified_name)
    ]
    assert records
    for record in records:
        assert record.unusable is None
        assert set(binding.chips) <= set(record.chips)
        arguments = {a.name for a in parse_text(record.text).arguments}
        assert set(binding.fixed) <= arguments
        shared = {"attention", "indexer"}  # one keyword map for an operator and its metadata
        assert binding.family in shared or set(binding.keywords.values()) <= arguments
        assert not set(binding.keywords) & (arguments - set(binding.keywords.values()))


def test_every_usable_schema_of_production_is_bound_or_left_out_on_purpose() -> None:
    """No recorded operator of the production packages is simply forgotten."""
    bound = {b.qualified_name for b in KERNELS}
    unbound = {r.qualified_name for r in load_schemas() if r.provider in PACKAGES and not r.unusable} - bound
    assert unbound == {
        "npu::npu_moe_finalize_routing",  # its index order depends on a mode
        "npu::npu_grouped_matmul.List",  # lengths on the host
        "npu::npu_format_cast.Tensor",
        "npu::npu_swiglu_group_quant",  # not in the production line
        "custom::scatter_nd_update_asc",  # npu_scatter_nd_update_ does it
    }


PRODUCTION = {
    "mix_streams": "custom::npu_hc_pre",
    "update_streams": "custom::npu_hc_post",
    "rms_norm": "npu::npu_rms_norm",
    "rotate": "custom::inplace_partial_rotary_mul",
    "pick_entries": "custom::npu_quant_lightning_indexer",
    "index_metadata": "custom::npu_quant_lightning_indexer_metadata",
    "route": "custom::npu_moe_gating_top_k",
    "grouped_matmul": "npu::npu_grouped_matmul",
    "keep_top": "npu::npu_top_k_top_p",
    "head": "",
}
A3 = PRODUCTION | {
    "compress": "npu::compressor",
    "quantize_rows": "npu::npu_dynamic_quant",
    "write_rows": "npu::npu_scatter_nd_update_",
    "attend": "custom::npu_sparse_attn_sharedkv",
    "attention_metadata": "custom::npu_sparse_attn_sharedkv_metadata",
    "activate": "npu::npu_clipped_swiglu",
    "write_window": "",
    "write_index": "",
}
A5 = PRODUCTION | {
    "compress": "custom::compressor",
    "quantize_rows": "npu::npu_dynamic_block_quant",
    "write_index": "custom::indexer_compress_epilog",
    "write_window": "custom::kv_compress_epilog",
    "attend": "custom::npu_kv_quant_sparse_attn_sharedkv",
    "attention_metadata": "custom::npu_kv_quant_sparse_attn_sharedkv_metadata",
    "activate": "",
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("chip", "expected"), [("a2", A3), ("a3", A3), ("a5", A5)])
def test_production_machines_get_what_production_calls(chip: str, expected: dict[str, str], release: str) -> None:
    """With the production packages nothing is missing and every operator is the one that production calls there."""
    providers = chosen(chip, torch_npu=release, strict=True)
    assert providers.missing == ()
    names = {name: providers[name].binding.qualified_name for name in expected}
    assert names == expected
    assert all(providers.has(name) is bool(qualified) for name, qualified in expected.items())
    assert set(providers.operators) == {b.operator for b in BINDINGS}
    for operator in providers.operators.values():
        if operator.schema is not None and operator.schema.provider == "torch-npu":
            assert release in operator.schema.releases


def test_families_come_from_one_package() -> None:
    """An attention without its metadata operator is not mixed with another package's."""
    lacking = ["custom::npu_sparse_attn_sharedkv_metadata", "custom::npu_quant_lightning_indexer"]
    providers = chosen(providers=EVERY, without=lacking)
    for names in (("attend", "attention_metadata"), ("pick_entries", "index_metadata")):
        assert {providers[name].binding.provider for name in names} == {"vllm-ascend"}
    alone = chosen(without=lacking)
    assert set(alone.missing) == {"attend", "attention_metadata", "pick_entries", "index_metadata"}
    assert not alone.has("attend")
    assert alone["attend"].binding.provider == "torch"


def test_missing_operators_fall_back_or_are_listed() -> None:
    """Without strict they fall back and are named; with strict the error lists all of them."""
    lacking = ["custom::npu_hc_pre", "npu::compressor"]
    providers = chosen(without=lacking)
    assert providers.missing == ("mix_streams", "compress")
    assert not providers.has("compress")
    with pytest.raises(ps.ConfigError, match="missing mix_streams, compress; install") as caught:
        chosen(without=lacking, strict=True)
    assert caught.value.field == "kernels"


@pytest.mark.parametrize(
    "change",
    [
        ("Tensor post, Tensor comb", "Tensor comb, Tensor post"),
        ("Tensor comb", "Tensor comb, int extra=0"),
        ("Tensor x, Tensor residual", "Tensor x, Tensor resid"),
        ("-> Tensor", "-> (Tensor, Tensor)"),
        ("Tensor x,", "Tensor(a!) x,"),
    ],
)
def test_another_live_schema_is_refused_with_both_texts(change: tuple[str, str]) -> None:
    """A registration that differs from the record in any way that a caller sees stops the start."""
    recorded = "custom::npu_hc_post(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor"
    live = recorded.replace(*change)
    assert live != recorded
    with pytest.raises(ps.ConfigError, match="recorded schema") as caught:
        chosen(instead={"custom::npu_hc_post": live})
    assert recorded in str(caught.value)
    assert live in str(caught.value)
    assert caught.value.field == "custom::npu_hc_post"


def test_a_schema_of_no_release_is_refused() -> None:
    """A torch-npu operator must have the form of one recorded release, and the error shows all of them."""
    name = "npu::npu_top_k_top_p"
    swapped = f"{name}(Tensor logits, Tensor? k=None, Tensor? p=None) -> Tensor"
    with pytest.raises(ps.ConfigError, match="npu_top_k_top_p of torch-npu"):
        chosen(instead={name: swapped})


def test_unknown_chips_and_empty_machines_are_refused() -> None:
    """A chip must be known and something must be registered."""
    with pytest.raises(ps.ConfigError, match=r"expected one of a2, a3, a5, got 'a4'"):
        choose_providers("a4", {"npu::npu_rms_norm": ""})
    assert installed_schemas() == {}
    with pytest.raises(ps.ConfigError, match="no Ascend operators are registered"):
        choose_providers("a3", installed_schemas())


def test_calls_go_through_keyword_maps() -> None:
    """Our argument names, the operator's order: one call for every package."""
    x, residual = torch.ones(1, 2, 16, dtype=BF16), torch.ones(1, 2, 4, 16, dtype=BF16)
    mixes = {"fn": torch.ones(24, 64), "scale": torch.ones(3), "base": torch.zeros(24)}
    results = []
    for packages in (PACKAGES, ("torch-npu", "vllm-ascend")):
        with simulate(providers=packages, strict_sizes=False) as machine, machine.recorder() as seen:
            providers = choose_providers("a3", installed_schemas())
            out = providers["mix_streams"](x=residual, **mixes, n_iters=20, norm_eps=1e-6, eps=1e-6)
            providers["update_streams"](x=x, residual=residual, post=out[1], comb=out[2])
            results.append((out, seen.names()))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
    assert [names for _, names in results] == [
        ["custom::npu_hc_pre", "custom::npu_hc_post"],
        ["_C_ascend::npu_hc_pre_v2", "_C_ascend::npu_hc_post"],
    ]


def test_first_arguments_go_by_place_and_fixed_ones_are_added() -> None:
    """What is required and not keyword-only is positional; options that defaults would get wrong are always there."""
    providers = chosen()
    x, w = object(), object()
    assert providers["rms_norm"].arguments(x=x, weight=w, eps=1e-5) == ((x, w), {"epsilon": 1e-5})
    args, kwargs = providers["activate"].arguments(x=x, limit=10.0)
    assert args == (x,)
    assert kwargs == {"alpha": 1.0, "bias": 0.0, "interleaved": False, "dim": -1, "limit": 10.0}
    args, kwargs = providers["attend"].arguments(q=x, window_left=127, scale=1.0)
    assert args == (x,)
    assert kwargs["ori_win_left"] == 127
    assert kwargs["layout_q"] == "TND"
    assert (kwargs["ori_mask_mode"], kwargs["cmp_mask_mode"]) == (4, 3)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("release", RELEASES)
def test_fixed_arguments_bind_to_every_recorded_schema(chip: str, release: str) -> None:
    """With placeholders for what is required, every chosen operator's call is one that its schema takes."""
    for operator in chosen(chip, torch_npu=release, providers=EVERY).operators.values():
        if operator.schema is None:
            continue
        back = {theirs: ours for ours, theirs in operator.binding.keywords.items()}
        parsed = parse_text(operator.schema.text).arguments
        needed = {a.name for a in parsed if not a.has_default_value()}
        args, kwargs = operator.arguments(**{back.get(n, n): n for n in needed - set(operator.binding.fixed)})
        by_place = [a.name for a in parsed if not a.kwarg_only][: len(args)]
        assert by_place == list(operator.positional)
        assert not set(kwargs) & set(by_place)
        assert set(kwargs) <= {a.name for a in parsed}
        assert needed <= {*by_place, *kwargs}
        assert all(
            value == name for name, value in zip(by_place, args, strict=True) if name not in operator.binding.fixed
        )


def test_tables_are_values() -> None:
    """Bindings and choices are frozen."""
    providers = chosen()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        providers.chip = "a5"  # type: ignore[misc]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        BINDINGS[0].name = "other"  # type: ignore[misc]


def test_nothing_is_imported_unless_asked(tmp_path: Path) -> None:
    """Importing purestep and looking at what is installed touches no kernel package; asking imports those there are."""
    (tmp_path / "torch_npu.py").write_text("loaded = True\n")
    code = (
        "import sys, purestep\n"
        "from purestep.ops.ascend import providers\n"
        "assert providers.installed_schemas() == {}\n"
        "assert 'torch_npu' not in sys.modules\n"
        "assert providers.import_packages() == ('torch-npu',), providers.import_packages()\n"
        "assert sys.modules['torch_npu'].loaded\n"
    )
    path = f"import sys; sys.path[:0] = {[str(tmp_path), *sys.path]!r}\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", path + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_package_here() -> None:
    """On a machine without kernel packages none is found."""
    assert import_packages() == ()
