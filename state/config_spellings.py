"""The three spellings of a DeepSeek-V4 ``config.json``, brought to the names of the released one.

Besides the released spelling there are the short names of the release's ``inference/config.json`` and what transformers
writes (layer types by name, nested rotary parameters). Where a file says one thing twice, both must agree.

Source: DeepSeek-V4 release, ``config.json`` and ``inference/model.py`` (``ModelArgs``); transformers 5.24,
``models/deepseek_v4/configuration_deepseek_v4.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

__all__ = ["Problem", "released_fields", "show_value"]

_Fields = dict[str, Any]

_SHORT_NAMES: Final[Mapping[str, str]] = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "moe_inter_dim": "moe_intermediate_size",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "window_size": "sliding_window",
    "n_hash_layers": "num_hash_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "norm_eps": "rms_norm_eps",
}

_LAYER_TYPES: Final[Mapping[str, int]] = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
"""Layer kinds of transformers and their usual rates, which ``compress_rates`` may replace."""

_OLD_RATES: Final[Mapping[str, str]] = {
    "compress_rate_csa": "compressed_sparse_attention",
    "compress_rate_hca": "heavily_compressed_attention",
}

_DTYPES: Final[Mapping[str, str]] = {
    "bf16": "bfloat16",
    "fp8": "bfloat16",  # the short form names the storage; such a model computes in bfloat16
}

_YARN_KEYS: Final = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "truncate",
)

_SHOWN: Final = 120
"""Characters of a wrong value that a message repeats."""


@attrs.frozen
class Problem:
    """One thing wrong with a configuration."""

    field: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, got {self.got}"


def show_value(raw: Any) -> str:
    """Show a value in a message, shortened in the middle so that both ends can be seen."""
    text = repr(raw)
    if len(text) <= _SHOWN:
        return text
    return f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


def released_fields(raw: Mapping[str, Any], problems: list[Problem]) -> _Fields:
    """Bring a configuration in any spelling to the released field names; values are not checked yet.

    Args:
        raw: the parsed ``config.json``.
        problems: what is found wrong is appended here.
    Returns:
        Fields by released name; ``rope_scaling`` is always there (null: no scaling), ``torch_dtype`` has its long name.
    """
    fields: _Fields = {name: raw[name] for name in raw if name not in ("dtype", "torch_dtype", "rope_scaling")}
    if "dim" in raw:
        for short, name in _SHORT_NAMES.items():
            if short in raw:
                _put(fields, name, raw[short], short, problems)
    for source in ("torch_dtype", "dtype"):
        if raw.get(source) is not None:
            word = str(raw[source]).removeprefix("torch.")
            _put(fields, "torch_dtype", _DTYPES.get(word, word), source, problems)
    if raw.get("rope_scaling") is not None:
        fields["rope_scaling"] = _scaling_part(raw["rope_scaling"])
    if raw.get("original_seq_len"):
        _put(fields, "rope_scaling", _scaling_from_short(raw), "original_seq_len", problems)
    if raw.get("rope_parameters") is not None:
        _unfold_rope(fields, raw["rope_parameters"], problems)
    if raw.get("partial_rotary_factor") is not None:
        _put_rotary_width(fields, raw["partial_rotary_factor"], "partial_rotary_factor", problems)
    if raw.get("layer_types") is not None:
        _unfold_layer_types(fields, raw, problems)
    if raw.get("mlp_layer_types") is not None:
        _unfold_mlp_types(fields, raw["mlp_layer_types"], problems)
    fields.setdefault("rope_scaling", None)
    return fields


def _put(fields: _Fields, name: str, value: Any, source: str, problems: list[Problem]) -> None:
    """Set a field, or report that two sources of it disagree."""
    if fields.setdefault(name, value) != value:
        problems.append(Problem(name, f"one value, {show_value(fields[name])}", f"{show_value(value)} in {source}"))


def _scaling_part(raw: Any) -> Any:
    """Take the YaRN part out of one set of rotary parameters; None where nothing is scaled."""
    if not isinstance(raw, Mapping):
        return raw
    kind = raw.get("rope_type", raw.get("type"))
    if kind in ("default", "none") or (kind is None and "factor" not in raw):
        return None
    return {"type": kind, **{key: raw[key] for key in _YARN_KEYS if raw.get(key) is not None}}


def _scaling_from_short(raw: Mapping[str, Any]) -> _Fields:
    names = {"original_seq_len": "original_max_position_embeddings", "rope_factor": "factor"}
    found = {names.get(key, key): raw[key] for key in (*names, "beta_fast", "beta_slow") if key in raw}
    return {"type": "yarn", **found}


def _unfold_rope(fields: _Fields, rope: Any, problems: list[Problem]) -> None:
    """Read transformers' ``rope_parameters``: ``main`` for window-only layers, ``compress`` for the others."""
    if not isinstance(rope, Mapping):
        problems.append(Problem("rope_parameters", "an object", show_value(rope)))
        return
    main, compress = rope.get("main"), rope.get("compress")
    if not (isinstance(main, Mapping) and isinstance(compress, Mapping)):
        _put(fields, "rope_scaling", _scaling_part(rope), "rope_parameters", problems)
        return
    if _scaling_part(main) is not None:
        expected = "no scaling (window-only layers have the plain base)"
        problems.append(Problem("rope_parameters.main", expected, show_value(main)))
    _put(fields, "rope_scaling", _scaling_part(compress), "rope_parameters.compress", problems)
    for part, at, base in ((main, "main", "rope_theta"), (compress, "compress", "compress_rope_theta")):
        if "rope_theta" in part:
            _put(fields, base, part["rope_theta"], f"rope_parameters.{at}", problems)
        if part.get("partial_rotary_factor") is not None:
            _put_rotary_width(fields, part["partial_rotary_factor"], f"rope_parameters.{at}", problems)


def _put_rotary_width(fields: _Fields, factor: Any, source: str, problems: list[Problem]) -> None:
    head = fields.get("head_dim")
    if type(factor) not in (int, float) or not 0 < factor <= 1:
        problems.append(Problem(f"{source} (partial rotary factor)", "a number in (0, 1]", show_value(factor)))
    elif type(head) is int:
        # Truncation, as in transformers: the factor is a quotient of two integers and may fall just below it.
        _put(fields, "qk_rope_head_dim", int(head * factor), source, problems)


def _unfold_layer_types(fields: _Fields, raw: Mapping[str, Any], problems: list[Problem]) -> None:
    types, rates = raw["layer_types"], raw.get("compress_rates") or {}
    known = isinstance(types, list | tuple) and all(isinstance(kind, str) and kind in _LAYER_TYPES for kind in types)
    if not known:
        problems.append(Problem("layer_types", f"a list of {', '.join(_LAYER_TYPES)}", show_value(types)))
        return
    if not isinstance(rates, Mapping):
        problems.append(Problem("compress_rates", "an object", show_value(rates)))
        return
    old = {name: raw[key] for key, name in _OLD_RATES.items() if key in raw}
    rate_of = {**_LAYER_TYPES, **rates, **old}
    ratios = [rate_of[kind] for kind in types]
    said = fields.get("compress_ratios")
    if isinstance(said, list | tuple) and list(said[: len(ratios)]) == ratios:
        return  # it may have one more entry, for the draft block
    _put(fields, "compress_ratios", ratios, "layer_types", problems)


def _unfold_mlp_types(fields: _Fields, types: Any, problems: list[Problem]) -> None:
    expected = "'hash_moe' for the first layers and 'moe' for the rest, one entry a layer"
    if not isinstance(types, list | tuple) or not all(isinstance(kind, str) for kind in types):
        problems.append(Problem("mlp_layer_types", expected, show_value(types)))
        return
    n_hash = types.count("hash_moe")
    right = ["hash_moe"] * n_hash + ["moe"] * (len(types) - n_hash)
    if list(types) != right or len(types) != fields.get("num_hidden_layers"):
        problems.append(Problem("mlp_layer_types", expected, f"{len(types)} entries, {show_value(types)}"))
        return
    _put(fields, "num_hash_layers", n_hash, "mlp_layer_types", problems)
