"""The recorded schemas: they parse, say what they mutate, and differ where two providers are known to differ."""

from __future__ import annotations

import json
from importlib import resources

import pytest
import torch
from ascend_sim.simulator import simulate
from purestep.ops.ascend.schemas import RecordedSchema, load_schemas, parse_text, same_contract

SCHEMAS = load_schemas()
IDS = [f"{s.provider}/{s.qualified_name}/{'+'.join(s.releases)}" for s in SCHEMAS]
PROVIDERS = {"torch-npu", "cann-recipes", "sgl-kernel-npu", "vllm-ascend"}


def find(provider: str, name: str, release: str = "2.13.0") -> RecordedSchema:
    """The one record of a provider's operator in a release."""
    (found,) = (
        s
        for s in SCHEMAS
        if (s.provider, s.qualified_name) == (provider, name) and (not s.releases or release in s.releases)
    )
    return found


def defaults(schema: RecordedSchema) -> dict[str, object]:
    """Defaults of a schema's arguments."""
    return {a.name: a.default_value for a in parse_text(schema.text).arguments if a.has_default_value()}


@pytest.mark.parametrize("schema", SCHEMAS, ids=IDS)
def test_every_schema_parses_and_says_what_it_writes(schema: RecordedSchema) -> None:
    """A record is a schema that torch parses; its chips, provider and written arguments are what it says."""
    parsed = parse_text(schema.text)
    assert parsed.name == f"{schema.namespace}::{schema.name}"
    assert (parsed.overload_name or "default") == schema.overload
    written = tuple(a.name for a in parsed.arguments if a.alias_info and a.alias_info.is_write)
    assert written == schema.mutates
    assert schema.provider in PROVIDERS
    assert schema.chips
    assert set(schema.chips) <= {"a2", "a3", "a5"}
    assert bool(schema.releases) == (schema.provider == "torch-npu")
    assert schema.source


def test_no_two_records_of_one_provider_collide() -> None:
    """In one release of one package an operator has one form."""
    seen = [(s.provider, s.qualified_name, release) for s in SCHEMAS for release in (s.releases or ("",))]
    assert len(seen) == len(set(seen))


def test_the_file_is_part_of_the_package() -> None:
    """The data file is found as a resource and names a public source for every record."""
    data = json.loads(resources.files("purestep.ops.ascend").joinpath("schemas.json").read_text("utf-8"))
    assert {entry["source"] for entry in data["schemas"]} <= set(data["sources"])


@pytest.mark.parametrize("schema", SCHEMAS, ids=IDS)
def test_a_printed_schema_is_the_same_contract(schema: RecordedSchema) -> None:
    """What torch prints for a schema compares equal to its record, write annotations without a letter included."""
    assert same_contract(str(parse_text(schema.text)), schema.text)


BASE = "npu::f(Tensor(a!) x, Tensor? y=None, *, int[2] r=[1, 2], float eps=1e-06, str m='a') -> (Tensor, Tensor(a!))"


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        (("Tensor(a!) x", "Tensor(a!) self"), False),
        (("npu::f", "npu::g"), False),
        (("Tensor(a!) x", "Tensor x"), False),
        (("Tensor? y=None", "Tensor y"), False),
        (("Tensor? y=None", "Tensor? z=None"), False),
        (("Tensor? y=None, *, ", "*, Tensor? y=None, "), False),
        (("int[2]", "int[3]"), False),
        (("1e-06", "1e-05"), False),
        (("str m='a'", "str m='b'"), False),
        ((", str m='a'", ""), False),
        (("float eps=1e-06, str m='a'", "str m='a', float eps=1e-06"), False),
        (("(Tensor, Tensor(a!))", "(Tensor, Tensor)"), False),
        (("(Tensor, Tensor(a!))", "Tensor(a!)"), False),
        (("'a'", '"a"'), True),
        (("(a!)", "(b!)"), True),
        (("(Tensor, ", "(Tensor y, "), True),
    ],
)
def test_contracts_differ_in_what_a_caller_sees(change: tuple[str, str], is_same: bool) -> None:
    """Name, type, default, order, keyword-only and writes are compared; letters and names of results are not."""
    assert change[0] in BASE
    assert same_contract(BASE, BASE.replace(*change)) is is_same


def test_first_argument_may_be_called_self() -> None:
    """Only the first argument, and only self for input."""
    assert same_contract("npu::f(Tensor input) -> Tensor", "npu::f(Tensor self) -> Tensor")
    assert not same_contract("npu::f(Tensor x, Tensor input) -> Tensor", "npu::f(Tensor x, Tensor self) -> Tensor")


DRIFT = [
    ("npu::npu_moe_gating_top_k", {"input_ids", "tid2eid"}, "2.10.0.post4"),
    ("npu::npu_moe_finalize_routing", {"k"}, "2.10.0.post4"),
    ("npu::npu_dynamic_mx_quant", {"max_low_bound"}, "2.10.0.post4"),
    ("npu::npu_mhc_pre", {"inner_precise"}, "2.10.0.post4"),
    ("npu::npu_transpose_quant_batchmatmul", {"x1_dtype", "x2_dtype"}, "2.10.0"),
]


@pytest.mark.parametrize(("name", "added", "release"), DRIFT)
def test_releases_of_torch_npu_differ_where_recorded(name: str, added: set[str], release: str) -> None:
    """The production line lacks exactly the arguments that later releases added."""
    old = {a.name for a in parse_text(find("torch-npu", name, release).text).arguments}
    new = {a.name for a in parse_text(find("torch-npu", name).text).arguments}
    assert new - old == added
    assert not old - new


def test_collisions_are_told_apart() -> None:
    """Operators of one name in several packages differ in the places where a caller would be misled."""
    window = "ori_win_left"
    assert defaults(find("cann-recipes", "custom::npu_sparse_attn_sharedkv"))[window] == 127
    assert defaults(find("vllm-ascend", "_C_ascend::npu_sparse_attn_sharedkv"))[window] == 128
    assert defaults(find("sgl-kernel-npu", "npu::sparse_attn_sharedkv"))[window] == 128
    ratio = "cmp_ratio"
    assert defaults(find("cann-recipes", "custom::npu_sparse_attn_sharedkv_metadata"))[ratio] == -1
    assert defaults(find("vllm-ascend", "_C_ascend::npu_sparse_attn_sharedkv_metadata"))[ratio] == 4
    assert ratio not in defaults(find("cann-recipes", "custom::compressor"))
    assert "state_cache_stride_dim0" in defaults(find("sgl-kernel-npu", "npu::compressor"))
    assert not defaults(find("vllm-ascend", "_C_ascend::compressor"))
    ours, theirs = (
        find("torch-npu", "npu::npu_dequant_swiglu_quant"),
        find("vllm-ascend", "_C_ascend::npu_dequant_swiglu_quant"),
    )
    assert (defaults(ours)["activate_left"], defaults(theirs)["activate_left"]) == (False, True)
    assert (defaults(ours)["clamp_limit"], defaults(theirs)["clamp_limit"]) == (7.0, 0.0)
    order = [a.name for a in parse_text(find("torch-npu", "npu::npu_top_k_top_p").text).arguments]
    assert order == ["logits", "p", "k"]


UNUSABLE = [
    *("npu::npu_quant_lightning_indexer", "npu::npu_lightning_indexer", "npu::npu_mhc_pre", "npu::npu_mhc_post"),
    *("npu::npu_interleave_rope", "npu::npu_rotary_mul", "npu::npu_swiglu", "npu::npu_moe_gating_top_k"),
]


@pytest.mark.parametrize("name", UNUSABLE)
def test_operators_that_look_right_carry_a_reason(name: str) -> None:
    """Every form of an operator that must not be called says why."""
    found = [s for s in SCHEMAS if s.qualified_name == name]
    assert found
    assert all(s.unusable for s in found)


@pytest.mark.parametrize("release", ["2.10.0", "2.10.0.post4", "2.13.0", "2.14.0"])
@pytest.mark.parametrize("chip", ["a2", "a3", "a5"])
def test_simulated_operators_have_the_recorded_schemas(chip: str, release: str) -> None:
    """What the simulator registers is the recorded contract, and it is gone afterwards."""
    with simulate(chip=chip, providers=sorted(PROVIDERS), torch_npu=release) as machine:
        for name, text in machine.schemas.items():
            namespace, rest = name.split("::")
            base, _, overload = rest.partition(".")
            live = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
            assert same_contract(str(live._schema), text)
    assert not hasattr(torch.ops.custom, "npu_hc_pre")
