"""Reading and writing of ``config.json``: three spellings, one meaning, and refusals that name what is wrong."""

from __future__ import annotations

import json
import logging
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.configs import configs, tiny_config
from purestep.state.config import Config, RopeScaling
from purestep.state.config_reading import config_from_dict, config_to_dict
from purestep.state.errors import ConfigError
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

# Transformers remarks through its logger that a YaRN factor and a context length do not multiply; toys need not.
logging.getLogger("transformers").setLevel(logging.ERROR)

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 129280,
}

PRO = FLASH | {
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "hidden_size": 7168,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "o_groups": 16,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
}

SHORT_NAMES = {
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_hash_layers": "n_hash_layers",
    "num_attention_heads": "n_heads",
    "num_experts_per_tok": "n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "qk_rope_head_dim": "rope_head_dim",
    "sliding_window": "window_size",
}
SAME_IN_SHORT = [
    "vocab_size",
    "n_routed_experts",
    "n_shared_experts",
    "swiglu_limit",
    "q_lora_rank",
    "head_dim",
    "o_groups",
    "o_lora_rank",
    "rope_theta",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "hc_mult",
    "hc_sinkhorn_iters",
    "compress_rope_theta",
    "compress_ratios",
]

COUNTS = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "sliding_window",
    "hc_mult",
    "hc_sinkhorn_iters",
    "max_position_embeddings",
]
NUMBERS = ["routed_scaling_factor", "swiglu_limit", "hc_eps", "rms_norm_eps", "rope_theta", "compress_rope_theta"]
NOT_COUNTS = [0, -1, True, 1.0, "8", None, [8], 2**70]
NOT_NUMBERS = [0, -1.0, float("nan"), float("inf"), False, "1.5", None, 10**400]
MAY_BE_ABSENT = {"hc_eps", "rms_norm_eps", "max_position_embeddings"}


def short_form(config: dict[str, Any]) -> dict[str, Any]:
    """Spell a config as the release's inference folder does."""
    short = {key: config[key] for key in SAME_IN_SHORT} | {SHORT_NAMES[key]: config[key] for key in SHORT_NAMES}
    yarn = config["rope_scaling"] or {"original_max_position_embeddings": 0, "factor": 1}
    short |= {"original_seq_len": yarn["original_max_position_embeddings"], "rope_factor": yarn["factor"]}
    return short | {"beta_fast": 32, "beta_slow": 1, "dtype": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4"}


def transformers_form(config: dict[str, Any]) -> dict[str, Any]:
    """Spell a config as transformers does after reading the released form."""
    return DeepseekV4Config(**{key: config[key] for key in config if key != "torch_dtype"}).to_dict() | {
        "dtype": config["torch_dtype"]
    }


def refusal(raw: Any) -> ConfigError:
    """Return the error of reading ``raw``."""
    with pytest.raises(ConfigError) as caught:
        config_from_dict(raw)
    return caught.value


@pytest.mark.parametrize(
    ("raw", "counts", "hidden"),
    [(FLASH, {0: 2, 4: 21, 128: 20}, 4096), (PRO, {0: 0, 4: 30, 128: 31}, 7168)],
    ids=["flash", "pro"],
)
def test_released_configs_are_read(raw: dict[str, Any], counts: dict[int, int], hidden: int) -> None:
    """The released files give the published layer pattern, sizes and scales."""
    config = config_from_dict(raw)
    assert {ratio: config.n_layers_of_ratio(ratio) for ratio in (0, 4, 128)} == counts
    assert len(config.compress_ratios) == config.num_hidden_layers == raw["num_hidden_layers"]
    assert [config.layer_ratio(layer) for layer in (0, 2, 3, config.num_hidden_layers - 1)] == [
        raw["compress_ratios"][0],
        4,
        128,
        4,
    ]
    assert [config.is_hash(layer) for layer in range(5)] == [True, True, True, False, False]
    assert config.hidden_size == hidden
    assert config.eos_token_id == (1,)
    assert config.torch_dtype == "bfloat16"
    assert config.attention_scale == pytest.approx(0.04419417, abs=1e-8)
    assert config.rope_scaling == RopeScaling()


def test_layers_that_compress_have_the_other_rope() -> None:
    """Window-only layers have the plain base; all others the long one with YaRN (MTH-01)."""
    config = config_from_dict(tiny_config((0, 4, 128), rope_theta=5000.0, compress_rope_theta=70000.0))
    yarn = RopeScaling(factor=4.0, original_max_position_embeddings=64)
    assert [config.layer_rope(layer) for layer in range(3)] == [(5000.0, None), (70000.0, yarn), (70000.0, yarn)]


@given(raw=configs(), eos=st.sampled_from([(), (1,), (1, 3)]), bos=st.sampled_from([None, 0]))
def test_written_configs_are_read_back_equal(raw: dict[str, Any], eos: tuple[int, ...], bos: int | None) -> None:
    """What ``config_to_dict`` writes survives JSON and is read back to an equal config."""
    config = attrs.evolve(config_from_dict(raw), eos_token_id=eos, bos_token_id=bos)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


@settings(max_examples=30)
@given(raw=configs())
def test_spellings_mean_the_same(raw: dict[str, Any]) -> None:
    """The released, the short and the transformers form of one model give one config."""
    config = config_from_dict(raw)
    defaults = attrs.evolve(config, max_position_embeddings=1048576, torch_dtype="bfloat16")
    assert config_from_dict(short_form(raw)) == defaults
    assert config_from_dict(transformers_form(raw)) == config


@settings(max_examples=30)
@given(raw=configs())
def test_transformers_reads_what_is_written(raw: dict[str, Any]) -> None:
    """transformers takes the written form and means the same by it."""
    config = config_from_dict(raw)
    assert config_from_dict(transformers_form(config_to_dict(config))) == config


def test_saved_transformers_config_is_read(tmp_path: Any) -> None:
    """The ``config.json`` that transformers saves is read, with and without YaRN."""
    for factor in (4.0, None):
        raw = tiny_config(yarn_factor=factor)
        DeepseekV4Config(**raw).save_pretrained(tmp_path)
        assert config_from_dict(json.loads((tmp_path / "config.json").read_text())) == config_from_dict(raw)


@pytest.mark.parametrize("raw", [FLASH, PRO, tiny_config()], ids=["flash", "pro", "tiny"])
def test_draft_entry_is_optional(raw: dict[str, Any]) -> None:
    """``compress_ratios`` may have an entry for the draft block or not; it means the same."""
    n_layers = raw["num_hidden_layers"]
    main = raw["compress_ratios"][:n_layers]
    read = [config_from_dict(raw | {"compress_ratios": ratios}) for ratios in (main, [*main, 0])]
    assert read[0] == read[1]
    assert read[0].compress_ratios == tuple(main)


@pytest.mark.parametrize(("said", "meant"), [(7, (7,)), ([7], (7,)), ([7, 9], (7, 9)), ([], ()), (None, ())], ids=str)
def test_eos_forms(said: Any, meant: tuple[int, ...]) -> None:
    """The end token may be one id, a list, or nothing."""
    assert config_from_dict(tiny_config() | {"eos_token_id": said}).eos_token_id == meant


def test_v3_leftovers_are_ignored() -> None:
    """Fields of older families and fields that nothing needs change nothing."""
    old = {
        "kv_lora_rank": 512,
        "v_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "intermediate_size": 18432,
        "quantization_config": {"quant_method": "fp8"},
    }
    assert config_from_dict(tiny_config() | old) == config_from_dict(tiny_config())


@pytest.mark.parametrize("model_type", ["deepseek_v41", "deepseek_v3", "llama", None, 4])
def test_other_models_are_refused(model_type: Any) -> None:
    """A config of another family is refused by its ``model_type``."""
    error = refusal(tiny_config() | {"model_type": model_type})
    assert "model_type" in str(error)
    assert repr(model_type) in str(error)
    assert error.field == "model_type"


def test_missing_model_type_is_refused() -> None:
    """Only the short form may leave the model unnamed."""
    raw = tiny_config()
    del raw["model_type"]
    assert refusal(raw).field == "model_type"


def test_dspark_pattern_is_refused() -> None:
    """A release with three draft layers is refused by its ratios and by its count of draft blocks."""
    text = str(refusal(FLASH | {"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0]}))
    assert "46 entries ending 4, 0, 0, 0" in text
    assert "43 entries" in text
    text = str(refusal(transformers_form(tiny_config()) | {"num_nextn_predict_layers": 3}))
    assert "num_nextn_predict_layers" in text
    assert "got 3" in text


@pytest.mark.parametrize("ratios", [[1, 2, 1, 2], [0, 8, 128, 8], [4, 4, 4, 64]], ids=str)
def test_unknown_ratios_are_refused(ratios: list[int]) -> None:
    """A ratio other than 0, 4 and 128 is refused, with its value."""
    text = str(refusal(tiny_config() | {"compress_ratios": ratios}))
    for ratio in set(ratios) - {0, 4, 128}:
        assert f"got {ratio} in layers" in text


@pytest.mark.parametrize("ratios", [[], [0], [0, 4, 128], [0, 4, 128, 4, 0, 0]], ids=str)
def test_ratios_of_another_length_are_refused(ratios: list[int]) -> None:
    """There must be a ratio for every layer."""
    assert f"{len(ratios)} entries" in str(refusal(tiny_config() | {"compress_ratios": ratios}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("tie_word_embeddings", True),
        ("num_key_value_heads", 4),
        ("norm_topk_prob", False),
        ("norm_topk_prob", 1),
        ("n_shared_experts", 2),
        ("n_shared_experts", 0),
        ("n_shared_experts", True),
    ],
)
def test_unsupported_variants_are_refused(field: str, value: Any) -> None:
    """A variant that is not implemented is refused by field and value."""
    error = refusal(tiny_config() | {field: value})
    assert error.field == field
    assert f"{field}: expected" in str(error)
    assert f"got {value!r}" in str(error)


@pytest.mark.parametrize("field", [*COUNTS, *NUMBERS, "num_hash_layers", "compress_ratios"])
def test_missing_fields_are_refused_by_name(field: str) -> None:
    """A field without which the model is not determined must be there; the few others have one known value."""
    raw = {key: value for key, value in tiny_config().items() if key != field}
    if field in MAY_BE_ABSENT:
        assert getattr(config_from_dict(raw), field) == attrs.fields_dict(Config)[field].default
    else:
        assert f"{field}: expected" in str(refusal(raw))


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in COUNTS for value in NOT_COUNTS]
    + [(field, value) for field in NUMBERS for value in NOT_NUMBERS]
    + [("num_hash_layers", value) for value in (-1, True, None, 1.0)]
    + [("bos_token_id", value) for value in (-1, True, "a", 64)]
    + [("eos_token_id", value) for value in (-1, True, [1, True], "a", [[1]], [1, 64])]
    + [("compress_ratios", value) for value in (None, 4, "4", [0, 4, True, 4], [0, 4, 128.0, 4], [None] * 4)]
    + [("torch_dtype", value) for value in ("int8", "float64", 16)],
)
def test_wrong_values_are_refused_by_name(field: str, value: Any) -> None:
    """A value of the wrong type or out of range is refused by field."""
    text = str(refusal(tiny_config() | {field: value}))
    assert f"{field}: expected" in text


@given(data=st.data())
def test_one_error_lists_all_problems(data: st.DataObject) -> None:
    """However many fields are wrong or missing, one error names them all and no sound one."""
    raw = tiny_config()
    wrong = data.draw(
        st.lists(st.sampled_from([*COUNTS, *NUMBERS, "scoring_func", "model_type"]), unique=True, min_size=1)
    )
    missing = data.draw(
        st.sets(st.sampled_from(sorted(set(wrong) - MAY_BE_ABSENT - {"scoring_func"}) or ["hidden_size"]))
    )
    for field in wrong:
        raw[field] = True
    for field in missing:
        raw.pop(field, None)
    text = str(refusal(raw))
    named = {line.split(":")[0].strip() for line in text.splitlines()[1:-1]}
    assert named == {*wrong, *missing}
    assert f"{len(named)} problem" in text


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"o_groups": 3}, "o_groups"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"qk_rope_head_dim": 34}, "qk_rope_head_dim"),
        ({"index_head_dim": 4}, "qk_rope_head_dim"),
        ({"num_hash_layers": 5}, "num_hash_layers"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({"rope_theta": 1.0}, "rope_theta"),
    ],
    ids=str,
)
def test_numbers_that_do_not_fit_together_are_refused(changes: dict[str, Any], field: str) -> None:
    """Fields that are sound by themselves are refused when they contradict each other, with both values."""
    error = refusal(tiny_config() | changes)
    assert error.field == field
    for value in changes.values():
        assert str(value) in str(error)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"type": "linear"}, "rope_scaling: expected type 'yarn'"),
        ({"type": "llama3"}, "'llama3'"),
        ({"type": None}, "None"),
        ({"factor": True}, "rope_scaling.factor"),
        ({"factor": float("nan")}, "rope_scaling.factor"),
        ({"original_max_position_embeddings": 0}, "rope_scaling.original_max_position_embeddings"),
        ({"beta_fast": -1}, "rope_scaling.beta_fast"),
        ({"beta_slow": 64}, "rope_scaling.beta_slow"),
        ({"attention_factor": 1.27}, "rope_scaling.attention_factor"),
        ({"truncate": False}, "rope_scaling.truncate"),
    ],
    ids=str,
)
def test_unsupported_rope_scaling_is_refused(changes: dict[str, Any], named: str) -> None:
    """Scaling other than sound YaRN is refused by name."""
    raw = tiny_config()
    assert named in str(refusal(raw | {"rope_scaling": raw["rope_scaling"] | changes}))


def test_yarn_needs_its_two_numbers() -> None:
    """YaRN without a factor or an original length is refused; its betas have known values."""
    raw = tiny_config()
    scaling = raw["rope_scaling"]
    for field in ("factor", "original_max_position_embeddings"):
        part = {key: scaling[key] for key in scaling if key != field}
        assert f"rope_scaling.{field}" in str(refusal(raw | {"rope_scaling": part}))
    part = {key: scaling[key] for key in scaling if "beta" not in key}
    assert config_from_dict(raw | {"rope_scaling": part}) == config_from_dict(raw)


@pytest.mark.parametrize("scaling", [None, {"type": "default"}, {"rope_type": "none"}, {}], ids=str)
def test_no_scaling(scaling: Any) -> None:
    """Null, and the words for none, mean that nothing is scaled."""
    assert config_from_dict(tiny_config() | {"rope_scaling": scaling}).rope_scaling is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_theta": 20000.0}, "rope_theta"),
        ({"qk_rope_head_dim": 16}, "qk_rope_head_dim"),
        ({"compress_ratios": [4, 4, 128, 4]}, "compress_ratios"),
        ({"num_hash_layers": 2}, "num_hash_layers"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"layer_types": "full"}, "layer_types"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "mlp_layer_types"),
        ({"mlp_layer_types": ["moe"] * 3}, "mlp_layer_types"),
        ({"compress_rates": {"heavily_compressed_attention": 8}}, "got 8 in layers"),
        ({"compress_rate_hca": 64}, "got 64 in layers"),
        ({"rope_scaling": {"type": "yarn", "factor": 9, "original_max_position_embeddings": 9}}, "rope_scaling"),
        ({"rope_parameters": {"main": {"rope_type": "yarn", "factor": 2.0}, "compress": {}}}, "rope_parameters.main"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "torch_dtype"),
    ],
    ids=str,
)
def test_two_statements_of_one_fact_must_agree(changes: dict[str, Any], named: str) -> None:
    """What transformers says twice, or in its own words, must be consistent and known."""
    assert named in str(refusal(transformers_form(tiny_config()) | changes))


@pytest.mark.parametrize("raw", [None, [], "x", 3], ids=str)
def test_only_objects_are_configs(raw: Any) -> None:
    """Something that is not a JSON object is refused."""
    assert "JSON object" in str(refusal(raw))
