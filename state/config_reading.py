"""Reading ``config.json`` into a ``Config``, and writing it back.

Any spelling is first brought to the released names (``config_spellings``); then every field is checked, and one error
names everything that is wrong. Unknown fields (leftovers of older families, quantisation, training) are ignored.

Source: DeepSeek-V4 release, ``config.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import attrs

from .config import Config, RopeScaling
from .config_spellings import Problem, released_fields, show_value
from .errors import ConfigError

__all__ = ["config_from_dict", "config_to_dict"]

_MODEL_TYPE: Final = "deepseek_v4"
_RATIOS: Final = (0, 4, 128)
_ADVICE: Final = (
    "purestep runs DeepSeek-V4 Flash, Pro and their Base variants; correct config.json or load one of those."
)

_INT_LIMIT: Final = 2**63
"""Whole numbers beyond this are damage, and would overflow what is computed from them."""

_FIXED: Final[Mapping[str, Any]] = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
}
"""Fields with one value that this engine implements; they may be absent, never different."""


@attrs.frozen
class _Kind:
    """What one field must hold, and how it enters the ``Config``."""

    expected: str
    holds: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda raw: raw


def _is_int(raw: Any, least: int) -> bool:
    # bool is a subclass of int; a file that says true for a size is wrong.
    return type(raw) is int and least <= raw < _INT_LIMIT


def _is_above(raw: Any, bound: float) -> bool:
    return type(raw) in (int, float) and bound < raw < _INT_LIMIT  # false for NaN


def _is_ids(raw: Any) -> bool:
    return raw is None or _is_int(raw, 0) or (isinstance(raw, list | tuple) and all(_is_int(item, 0) for item in raw))


def _tuple_from_ids(raw: Any) -> tuple[int, ...]:
    if raw is None:
        return ()
    return (raw,) if isinstance(raw, int) else tuple(raw)


_COUNT: Final = _Kind("a positive integer", lambda raw: _is_int(raw, 1))
_NATURAL: Final = _Kind("an integer of at least 0", lambda raw: _is_int(raw, 0))
_POSITIVE: Final = _Kind("a positive finite number", lambda raw: _is_above(raw, 0), float)
_ROPE_BASE: Final = _Kind("a finite number above 1", lambda raw: _is_above(raw, 1), float)

_KINDS: Final[Mapping[str, _Kind]] = {
    "vocab_size": _COUNT,
    "hidden_size": _COUNT,
    "num_hidden_layers": _COUNT,
    "num_attention_heads": _COUNT,
    "head_dim": _COUNT,
    "qk_rope_head_dim": _COUNT,
    "q_lora_rank": _COUNT,
    "o_groups": _COUNT,
    "o_lora_rank": _COUNT,
    "compress_ratios": _Kind(
        "a list of integers",
        lambda raw: isinstance(raw, list | tuple) and all(_is_int(item, 0) for item in raw),
        tuple,
    ),
    "moe_intermediate_size": _COUNT,
    "n_routed_experts": _COUNT,
    "num_experts_per_tok": _COUNT,
    "index_n_heads": _COUNT,
    "index_head_dim": _COUNT,
    "index_topk": _COUNT,
    "sliding_window": _COUNT,
    "num_hash_layers": _NATURAL,
    "routed_scaling_factor": _POSITIVE,
    "swiglu_limit": _POSITIVE,
    "hc_mult": _COUNT,
    "hc_sinkhorn_iters": _COUNT,
    "hc_eps": _POSITIVE,
    "rms_norm_eps": _POSITIVE,
    "rope_theta": _ROPE_BASE,
    "compress_rope_theta": _ROPE_BASE,
    "max_position_embeddings": _COUNT,
    "bos_token_id": _Kind("a token id or null", lambda raw: raw is None or _is_int(raw, 0)),
    "eos_token_id": _Kind("a token id, a list of them, or null", _is_ids, _tuple_from_ids),
    "torch_dtype": _Kind("bfloat16, float16 or float32", lambda raw: raw in ("bfloat16", "float16", "float32")),
}

_SCALING_KINDS: Final[Mapping[str, _Kind]] = {
    "factor": _POSITIVE,
    "original_max_position_embeddings": _COUNT,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
}

_OPTIONAL: Final = frozenset(
    {"hc_eps", "rms_norm_eps", "max_position_embeddings", "bos_token_id", "eos_token_id", "torch_dtype"}
)
"""Fields that the short form does not have; the ``Config`` defaults are the values of every release."""

_RULES: Final[tuple[tuple[tuple[str, ...], Callable[..., bool], str], ...]] = (
    (
        ("o_groups", "num_attention_heads"),
        lambda groups, heads: heads % groups == 0,
        "a divisor of num_attention_heads",
    ),
    (("qk_rope_head_dim",), lambda rope: rope % 2 == 0, "an even number (channels rotate in pairs)"),
    (("qk_rope_head_dim", "head_dim"), lambda rope, head: rope <= head, "at most head_dim"),
    (("qk_rope_head_dim", "index_head_dim"), lambda rope, head: rope <= head, "at most index_head_dim"),
    (("num_hash_layers", "num_hidden_layers"), lambda hashed, layers: hashed <= layers, "at most num_hidden_layers"),
    (("num_experts_per_tok", "n_routed_experts"), lambda chosen, of: chosen <= of, "at most n_routed_experts"),
    (("bos_token_id", "vocab_size"), lambda bos, vocab: bos is None or bos < vocab, "an id below vocab_size"),
    (("eos_token_id", "vocab_size"), lambda eos, vocab: all(item < vocab for item in eos), "ids below vocab_size"),
)
"""(fields, rule, expected): what must hold between fields, told about the first of them."""


def config_from_dict(raw: Mapping[str, Any]) -> Config:
    """Read a model's configuration from the content of a ``config.json``.

    Args:
        raw: the parsed JSON object, in any of the three spellings.
    Returns:
        The configuration. An entry of ``compress_ratios`` for the draft block is dropped.
    Raises:
        ConfigError: the file is not a DeepSeek-V4 configuration that purestep can run; the message lists every problem.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"config: expected a JSON object, got {show_value(raw)}. {_ADVICE}", expected="a JSON object", got=raw
        )
    problems: list[Problem] = []
    fields = released_fields(raw, problems)
    _refuse_other_models(fields, "dim" in raw, problems)
    values = _read_fields(fields, _KINDS, _OPTIONAL, "", problems)
    scaling = _read_scaling(fields["rope_scaling"], problems)
    for names, rule, expected in _RULES:
        if all(name in values for name in names) and not rule(*(values[name] for name in names)):
            got = ", ".join(f"{name} = {show_value(values[name])}" for name in names)
            problems.append(Problem(names[0], expected, got))
    _check_ratios(values, problems)
    if problems:
        first = problems[0]
        text = "".join(f"\n  {problem}" for problem in problems)
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ConfigError(
            f"config: {count}:{text}\n{_ADVICE}", field=first.field, expected=first.expected, got=first.got
        )
    values["compress_ratios"] = values["compress_ratios"][: values["num_hidden_layers"]]
    return Config(**values, rope_scaling=scaling)


def config_to_dict(config: Config) -> dict[str, Any]:
    """Write a configuration in the released form, ready for ``json.dump``.

    No draft block is described: ``compress_ratios`` has one entry a layer.

    Args:
        config: the configuration.
    Returns:
        A JSON object that ``config_from_dict`` reads back to an equal ``Config``, and that transformers reads too.
    """
    fields = attrs.asdict(config, recurse=False)
    eos = config.eos_token_id
    fields["compress_ratios"] = list(config.compress_ratios)
    fields["eos_token_id"] = None if not eos else eos[0] if len(eos) == 1 else list(eos)
    fields["rope_scaling"] = config.rope_scaling and {"type": "yarn", **attrs.asdict(config.rope_scaling)}
    header = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": _MODEL_TYPE, "num_nextn_predict_layers": 0}
    return {**header, **_FIXED, **fields}


def _read_fields(
    fields: Mapping[str, Any], kinds: Mapping[str, _Kind], optional: Collection[str], at: str, problems: list[Problem]
) -> dict[str, Any]:
    """Check and convert the fields of one object; the bad ones are reported and left out."""
    values: dict[str, Any] = {}
    for name, kind in kinds.items():
        if name not in fields:
            if name not in optional:
                problems.append(Problem(at + name, kind.expected, "nothing (the field is missing)"))
        elif not kind.holds(fields[name]):
            problems.append(Problem(at + name, kind.expected, show_value(fields[name])))
        else:
            values[name] = kind.convert(fields[name])
    return values


def _read_scaling(raw: Any, problems: list[Problem]) -> RopeScaling | None:
    if raw is None:
        return None
    if not isinstance(raw, Mapping) or raw["type"] != "yarn":
        kind = raw["type"] if isinstance(raw, Mapping) else raw
        problems.append(Problem("rope_scaling", "type 'yarn', 'default' or 'none', or null", show_value(kind)))
        return None
    # DeepSeek-V4 leaves cos and sin unscaled and rounds the ends of the ramp.
    n_problems = len(problems)
    for name, only in (("attention_factor", 1), ("truncate", True)):
        if raw.get(name, only) != only:
            problems.append(Problem(f"rope_scaling.{name}", show_value(only), show_value(raw[name])))
    values = _read_fields(raw, _SCALING_KINDS, ("beta_fast", "beta_slow"), "rope_scaling.", problems)
    if len(problems) > n_problems:
        return None
    scaling = RopeScaling(**values)
    if scaling.beta_slow > scaling.beta_fast:
        problems.append(Problem("rope_scaling.beta_slow", "at most beta_fast", show_value(scaling)))
    return scaling


def _refuse_other_models(fields: Mapping[str, Any], is_short: bool, problems: list[Problem]) -> None:
    """Report what belongs to a relative of the family, or to a variant that is not implemented."""
    # The short form names no model.
    if (model_type := fields.get("model_type")) != _MODEL_TYPE and not (is_short and model_type is None):
        problems.append(Problem("model_type", repr(_MODEL_TYPE), show_value(model_type)))
    for name, only in _FIXED.items():
        raw = fields.get(name, only)
        if type(raw) is not type(only) or raw != only:
            problems.append(Problem(name, show_value(only), show_value(raw)))
    drafts = fields.get("num_nextn_predict_layers")
    if drafts not in (None, 0, 1):
        expected = "0 or 1 draft block (releases with more have another draft model)"
        problems.append(Problem("num_nextn_predict_layers", expected, show_value(drafts)))


def _check_ratios(values: Mapping[str, Any], problems: list[Problem]) -> None:
    ratios, n_layers = values.get("compress_ratios"), values.get("num_hidden_layers")
    if ratios is None:
        return
    if n_layers is not None and len(ratios) not in (n_layers, n_layers + 1):
        expected = f"{n_layers} entries, one a layer, or {n_layers + 1}, one more for a draft block"
        ending = ", ".join(str(ratio) for ratio in ratios[-4:])
        problems.append(Problem("compress_ratios", expected, f"{len(ratios)} entries ending {ending or 'nowhere'}"))
    wrong = {
        ratio: [at for at, other in enumerate(ratios) if other == ratio] for ratio in sorted(set(ratios) - set(_RATIOS))
    }
    for ratio, layers in wrong.items():
        problems.append(
            Problem("compress_ratios", f"ratios out of {_RATIOS}", f"{ratio} in layers {show_value(layers)}")
        )
