"""Which package provides which operator on which chip, chosen once from what is installed.

The table below is in order of preference: first what production on that chip runs. Operators that must come from one
package (an operator and the metadata it reads) form a family. An operator without any provider falls back to the plain
function of ``ops/``, which is also what the table decides for some on purpose.

Source: SGLang 0.5.23 ``hardware_backend/npu``, vllm-ascend @182b75e ``csrc/torch_binding.cpp``, cann-recipes-infer
@fbc225d ``ops/ascendc``; kernel sheet, sections 1 to 8.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch

from ...state.errors import ConfigError
from .schemas import RecordedSchema, load_schemas, parse_text, same_contract

__all__ = [
    "BINDINGS",
    "CHIPS",
    "MODULES",
    "Binding",
    "Operator",
    "Providers",
    "choose_providers",
    "import_packages",
    "installed_schemas",
]

CHIPS: Final = ("a2", "a3", "a5")
"""Ascend 910B, 910C and 950."""

MODULES: Final[Mapping[str, str]] = {
    "torch-npu": "torch_npu",
    "cann-recipes": "custom_ops",
    "sgl-kernel-npu": "sgl_kernel_npu",
    "vllm-ascend": "vllm_ascend.vllm_ascend_C",
}
"""What to import so that a package registers its operators; torch-npu first, the others need it."""


@attrs.frozen(eq=False, kw_only=True)
class Binding:
    """One way to run a logical operator.

    Attributes:
        operator: logical name.
        provider: package, or "torch" for the plain function of ``ops/``.
        namespace: of ``torch.ops``.
        name: of the operator there.
        overload: of the operator there.
        keywords: our argument name -> the operator's, where they differ.
        fixed: arguments of the operator that always have one value here.
        chips: where it runs.
        family: operators that must come from one package have one family.
        note: why there is no better choice, or nothing.
    """

    operator: str
    provider: str
    namespace: str = ""
    name: str = ""
    overload: str = "default"
    keywords: Mapping[str, str] = attrs.field(factory=dict)
    fixed: Mapping[str, Any] = attrs.field(factory=dict)
    chips: tuple[str, ...] = CHIPS
    family: str = ""
    note: str = ""

    @property
    def qualified_name(self) -> str:
        """The operator's name as in ``namespace::name``, empty for a plain function."""
        if not self.name:
            return ""
        return f"{self.namespace}::{self.name}" + ("" if self.overload == "default" else f".{self.overload}")


_A3: Final = ("a2", "a3")
_A5: Final = ("a5",)
_MIX: Final = {"fn": "hc_fn", "scale": "hc_scale", "base": "hc_base", "n_iters": "hc_sinkhorn_iters", "eps": "hc_eps"}
_ROTATE: Final = {"cos": "r1", "sin": "r2"}
_COMPRESS: Final = {
    "state": "state_cache",
    "norm": "norm_weight",
    "sin": "rope_sin",
    "cos": "rope_cos",
    "table": "state_block_table",
    "rope_width": "rope_head_dim",
    "ratio": "cmp_ratio",
    "eps": "norm_eps",
}
_INDEX: Final = {
    "query_scale": "query_dequant_scale",
    "key_scale": "key_dequant_scale",
    "query_ends": "actual_seq_lengths_query",
    "key_lens": "actual_seq_lengths_key",
    "table": "block_table",
    "count": "sparse_count",
    "n_heads": "num_heads_q",
    "width": "head_dim",
}
_INDEX_FIXED: Final = {
    "query_quant_mode": 0,
    "key_quant_mode": 0,
    "layout_query": "TND",
    "layout_key": "PA_BSND",
    "sparse_mode": 3,
    "cmp_ratio": 4,
}
_ATTEND: Final = {
    "window": "ori_kv",
    "entries": "cmp_kv",
    "picks": "cmp_sparse_indices",
    "window_table": "ori_block_table",
    "entry_table": "cmp_block_table",
    "query_starts": "cu_seqlens_q",
    "key_lens": "seqused_kv",
    "scale": "softmax_scale",
    "ratio": "cmp_ratio",
    "window_left": "ori_win_left",
    "n_heads": "num_heads_q",
    "width": "head_dim",
    "n_picks": "cmp_topk",
    "has_entries": "has_cmp_kv",
    "rope_width": "rope_head_dim",
}
# Defaults of these differ between packages, so none of them is left to a default.
_ATTEND_FIXED: Final = {
    "ori_mask_mode": 4,
    "cmp_mask_mode": 3,
    "ori_win_right": 0,
    "layout_q": "TND",
    "layout_kv": "PA_ND",
}
_PACKED: Final = {"kv_quant_mode": 1, "tile_size": 64}
_ROUTE: Final = {"logits": "x", "count": "k", "factor": "routed_scaling_factor", "table": "tid2eid"}
_ROUTE_FIXED: Final = {"norm_type": 2, "renorm": 0, "k_group": 1, "group_count": 1, "group_select_mode": 0}
_CLAMPED: Final = {"alpha": 1.0, "bias": 0.0, "interleaved": False, "dim": -1}
_DEQUANT_CLAMPED: Final = {
    "activate_left": True,
    "quant_mode": 1,
    "swiglu_mode": 1,
    "glu_alpha": 1.0,
    "glu_bias": 0.0,
}


def _npu(operator: str, name: str, **rest: Any) -> Binding:
    return Binding(operator=operator, provider="torch-npu", namespace="npu", name=name, **rest)


def _recipes(operator: str, name: str, **rest: Any) -> Binding:
    return Binding(operator=operator, provider="cann-recipes", namespace="custom", name=name, **rest)


def _vllm(operator: str, name: str, **rest: Any) -> Binding:
    return Binding(operator=operator, provider="vllm-ascend", namespace="_C_ascend", name=name, **rest)


def _plain(operator: str, note: str, chips: tuple[str, ...] = CHIPS) -> Binding:
    return Binding(operator=operator, provider="torch", chips=chips, note=note)


def _indexer_bindings() -> tuple[Binding, ...]:
    shared: dict[str, Any] = {"keywords": _INDEX, "family": "indexer"}
    metadata = _INDEX_FIXED | {"num_heads_k": 1}
    return (
        _recipes("pick_entries", "npu_quant_lightning_indexer", fixed=_INDEX_FIXED, **shared),
        _recipes("index_metadata", "npu_quant_lightning_indexer_metadata", fixed=metadata, **shared),
        _vllm("pick_entries", "npu_vllm_quant_lightning_indexer", fixed=_INDEX_FIXED, **shared),
        _vllm("index_metadata", "npu_vllm_quant_lightning_indexer_metadata", fixed=metadata, **shared),
    )


def _attention_bindings() -> tuple[Binding, ...]:
    shared: dict[str, Any] = {"keywords": _ATTEND, "family": "attention"}
    found: list[Binding] = []
    for make in (_recipes, _vllm):
        for chips, name, more in (
            (_A3, "npu_sparse_attn_sharedkv", {}),
            (_A5, "npu_kv_quant_sparse_attn_sharedkv", _PACKED),
        ):
            fixed = _ATTEND_FIXED | more
            one = {"num_heads_kv": 1, "has_ori_kv": True}
            found.append(make("attend", name, fixed=fixed, chips=chips, **shared))
            found.append(make("attention_metadata", f"{name}_metadata", fixed=fixed | one, chips=chips, **shared))
    return tuple(found)


BINDINGS: Final[tuple[Binding, ...]] = (
    _recipes("mix_streams", "npu_hc_pre", keywords=_MIX, fixed={"hc_mult": 4}),
    _vllm("mix_streams", "npu_hc_pre_v2", keywords=_MIX, fixed={"hc_mult": 4}),
    _recipes("update_streams", "npu_hc_post"),
    _vllm("update_streams", "npu_hc_post"),
    _npu("rms_norm", "npu_rms_norm", keywords={"x": "input", "weight": "gamma", "eps": "epsilon"}),
    _recipes("rotate", "inplace_partial_rotary_mul", keywords=_ROTATE, fixed={"rotary_mode": "interleave"}),
    _vllm("rotate", "inplace_partial_rotary_mul", keywords=_ROTATE, fixed={"rotary_mode": "interleave"}),
    _plain("write_window", "production assigns rows by index here", chips=_A3),
    _recipes(
        "write_window",
        "kv_compress_epilog",
        keywords={"cache": "kv_compress_cache", "rows": "x", "slots": "slot_mapping"},
        fixed={"quant_group_size": 64, "quant_mode": 2, "round_scale_flag": True},
        chips=_A5,
    ),
    _vllm(
        "write_window",
        "kv_compress_epilog",
        keywords={"cache": "kv_compress_cache", "rows": "x", "slots": "slot_mapping"},
        fixed={"quant_group_size": 64, "quant_mode": 2, "round_scale_flag": True, "layout": 1},
        chips=_A5,
    ),
    # Mode 2 means a table of rows here, and one bank per request there.
    Binding(
        operator="compress",
        provider="sgl-kernel-npu",
        namespace="npu",
        name="compressor",
        keywords=_COMPRESS,
        fixed={"rotary_mode": 2, "cache_mode": 2},
        chips=_A3,
    ),
    _recipes("compress", "compressor", keywords=_COMPRESS, fixed={"rotary_mode": 2, "cache_mode": 2}, chips=_A5),
    _npu("quantize_rows", "npu_dynamic_quant", keywords={"x": "input"}, fixed={"quant_mode": "pertoken"}, chips=_A3),
    _npu(
        "quantize_rows",
        "npu_dynamic_block_quant",
        fixed={"row_block_size": 1, "col_block_size": 128, "dst_type": 292, "round_mode": "rint"},
        chips=_A5,
    ),
    _npu(
        "write_rows",
        "npu_scatter_nd_update_",
        keywords={"cache": "input", "slots": "indices", "rows": "updates"},
    ),
    _recipes(
        "write_index",
        "indexer_compress_epilog",
        keywords={
            "cache": "indexer_compress_cache",
            "scales": "indexer_compress_scale",
            "rows": "x",
            "slots": "slot_mapping",
        },
        fixed={"quant_mode": 1, "round_scale": True},
        chips=_A5,
    ),
    *_indexer_bindings(),
    *_attention_bindings(),
    _npu(
        "project_groups",
        "npu_transpose_batchmatmul",
        keywords={"x": "input", "w": "weight"},
        fixed={"perm_x1": (1, 0, 2), "perm_x2": (0, 1, 2), "perm_y": (1, 0, 2), "batch_split_factor": 1},
        chips=_A3,
    ),
    _npu(
        "project_groups",
        "npu_transpose_quant_batchmatmul",
        keywords={"x": "x1", "w": "x2", "x_scale": "x1_scale", "w_scale": "x2_scale"},
        fixed={"group_sizes": (0, 0, 32), "perm_x1": (1, 0, 2), "perm_x2": (0, 1, 2), "perm_y": (1, 0, 2)},
        chips=_A5,
        family="quantised groups",
    ),
    _npu("quantize_groups", "npu_dynamic_mx_quant", keywords={"x": "input"}, chips=_A5, family="quantised groups"),
    _recipes("route", "npu_moe_gating_top_k", keywords=_ROUTE, fixed=_ROUTE_FIXED),
    _vllm("route", "moe_gating_top_k_hash", keywords=_ROUTE, fixed=_ROUTE_FIXED),
    _npu(
        "init_routing",
        "npu_moe_init_routing_v2",
        keywords={"ids": "expert_idx", "n_experts": "expert_num", "expert_range": "active_expert_range"},
        fixed={"expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "row_idx_type": 0, "drop_pad_mode": 0},
    ),
    _npu(
        "grouped_matmul",
        "npu_grouped_matmul",
        keywords={"w": "weight", "counts": "group_list", "x_scale": "per_token_scale"},
        fixed={"split_item": 2, "group_type": 0, "group_list_type": 1},
    ),
    _npu("activate", "npu_clipped_swiglu", fixed=_CLAMPED, chips=_A3),
    _plain("activate", "the operator is documented for the A2 and A3 only", chips=_A5),
    # Not the operators of this name in torch-npu and vllm-ascend: their clamps and dtypes are other arguments.
    _recipes(
        "activate_blocks",
        "npu_swiglu_group_quant",
        keywords={"counts": "group_index", "limit": "clamp_limit"},
        fixed={
            "dst_type": torch.float8_e4m3fn,
            "quant_mode": 1,
            "block_size": 32,
            "round_scale": True,
            "output_origin": False,
        },
        chips=_A5,
    ),
    _npu(
        "activate_quantised",
        "npu_dequant_swiglu_quant",
        keywords={"w_scale": "weight_scale", "x_scale": "activation_scale", "limit": "clamp_limit"},
        fixed=_DEQUANT_CLAMPED,
        note="its clamped mode takes gate and up from neighbouring channels: interleave the weight's columns",
    ),
    _vllm(
        "activate_quantised",
        "npu_dequant_swiglu_quant",
        keywords={"w_scale": "weight_scale", "x_scale": "activation_scale", "limit": "clamp_limit"},
        fixed=_DEQUANT_CLAMPED,
        chips=_A3,
    ),
    # Not npu_moe_finalize_routing: its index order depends on a mode, and it is documented for the A2 only.
    _npu(
        "combine_rows",
        "npu_moe_token_unpermute",
        keywords={"rows": "permuted_tokens", "row_idx": "sorted_indices", "weights": "probs"},
    ),
    _npu("dispatch", "npu_moe_distribute_dispatch_v2", family="expert parallel"),
    _npu("combine", "npu_moe_distribute_combine_v2", family="expert parallel"),
    _npu(
        "quantised_linear",
        "npu_quant_matmul",
        keywords={"x": "x1", "w": "x2", "w_scale": "scale", "x_scale": "pertoken_scale"},
    ),
    _npu("format_weight", "npu_format_cast", keywords={"w": "input"}, fixed={"acl_format": 29}),
    _npu("keep_top", "npu_top_k_top_p"),
    _plain("linear", "a plain matrix product"),
    _plain("embed_rows", "a plain gather"),
    _plain("head", "a plain matrix product"),
    _plain("penalties", "no package has an operator for them"),
    _plain("mask_tokens", "the bit order of the packages' operator is not established"),
)
"""Every binding, in order of preference."""


@attrs.frozen(eq=False, kw_only=True)
class Operator:
    """A chosen binding and how its arguments are passed.

    Attributes:
        binding: what was chosen.
        schema: the recorded schema that the live one equals; None for a plain function.
        positional: the operator's required leading arguments, passed by place: some registrations name the first
            one differently.
    """

    binding: Binding
    schema: RecordedSchema | None
    positional: tuple[str, ...]

    def arguments(self, **given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turn our argument names into the call that the schema takes.

        Args:
            given: by our names.
        Returns:
            (args, kwargs).
        """
        names = self.binding.keywords
        named = {**self.binding.fixed, **{names.get(key, key): value for key, value in given.items()}}
        return tuple(named.pop(name) for name in self.positional if name in named), named

    def __call__(self, **given: Any) -> Any:
        """Call the operator with arguments by our names."""
        args, kwargs = self.arguments(**given)
        packet = getattr(getattr(torch.ops, self.binding.namespace), self.binding.name)
        return getattr(packet, self.binding.overload)(*args, **kwargs)


@attrs.frozen(eq=False, kw_only=True)
class Providers:
    """What runs every logical operator on one machine.

    Attributes:
        chip: "a2", "a3" or "a5".
        operators: logical name -> what was chosen.
        missing: logical operators that a package has on this chip, but none that is installed here; they fall back.
    """

    chip: str
    operators: Mapping[str, Operator]
    missing: tuple[str, ...]

    def has(self, operator: str) -> bool:
        """Tell whether a kernel runs the operator, rather than the plain function."""
        return self.operators[operator].schema is not None

    def __getitem__(self, operator: str) -> Operator:
        """Look up a logical operator."""
        return self.operators[operator]


def import_packages() -> tuple[str, ...]:
    """Import the kernel packages of this machine, so that they register their operators.

    Called only where the caller asked for Ascend kernels.

    Returns:
        The packages that are there.
    """
    found = []
    for provider, module in MODULES.items():
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            importlib.import_module(module)
            found.append(provider)
    return tuple(found)


def installed_schemas() -> dict[str, str]:
    """Read the live schemas of every operator in the table that is registered: qualified name -> text."""
    found = {}
    for binding in BINDINGS:
        packet = getattr(getattr(torch.ops, binding.namespace), binding.name, None) if binding.name else None
        if packet is not None and binding.overload in packet.overloads():
            found[binding.qualified_name] = str(getattr(packet, binding.overload)._schema)
    return found


def choose_providers(chip: str, installed: Mapping[str, str], *, strict: bool = False) -> Providers:
    """Choose a provider for every operator and check the live schemas against the recorded ones.

    Args:
        chip: "a2", "a3" or "a5".
        installed: as from ``installed_schemas``.
        strict: refuse to run when an operator would fall back although a package has it on this chip.
    Returns:
        The choice.
    Raises:
        ConfigError: unknown chip, nothing installed, a live schema that is not the recorded one, or ``strict``.
    """
    if chip not in CHIPS:
        names = ", ".join(CHIPS)
        raise ConfigError(f"chip: expected one of {names}, got {chip!r}", field="chip", expected=names, got=chip)
    if not installed:
        raise ConfigError(
            "kernels: no Ascend operators are registered; install torch-npu, sgl-kernel-npu and custom_ops and source "
            "the CANN environment, or choose other kernels",
            field="kernels",
            expected="registered operators",
            got="none",
        )
    recorded = load_schemas()
    families = _families(chip)
    chosen: dict[str, Operator] = {}
    missing: list[str] = []
    for operators, candidates in families:
        binding_of = next((c for c in candidates if _is_complete(c, installed)), None)
        for operator in operators:
            if binding_of is None:
                missing.append(operator)
                plain = _plain(operator, "no installed package has it", chips=(chip,))
                chosen[operator] = Operator(binding=plain, schema=None, positional=())
            else:
                chosen[operator] = _bound(binding_of[operator], recorded, installed)
    if missing and strict:
        names = ", ".join(missing)
        raise ConfigError(
            f"kernels: expected every operator of chip {chip}, missing {names}; install the packages that have them, "
            "or allow fallbacks",
            field="kernels",
            expected="all operators",
            got=names,
        )
    return Providers(chip=chip, operators=chosen, missing=tuple(missing))


def _families(chip: str) -> list[tuple[tuple[str, ...], list[dict[str, Binding]]]]:
    """List the operators that go together on a chip, with the complete sets of bindings that packages have."""
    groups: dict[str, dict[str, dict[str, Binding]]] = {}
    for binding in BINDINGS:
        if chip in binding.chips:
            by_provider = groups.setdefault(binding.family or binding.operator, {})
            by_provider.setdefault(binding.provider, {})[binding.operator] = binding
    found = []
    for by_provider in groups.values():
        operators = tuple(dict.fromkeys(name for bindings in by_provider.values() for name in bindings))
        found.append((operators, [b for b in by_provider.values() if len(b) == len(operators)]))
    known = {name for operators, _ in found for name in operators}
    others = dict.fromkeys(b.operator for b in BINDINGS if b.operator not in known)
    note = "this chip needs no operator for it"
    return found + [((name,), [{name: _plain(name, note, chips=(chip,))}]) for name in others]


def _is_complete(bindings: Mapping[str, Binding], installed: Mapping[str, str]) -> bool:
    return all(not b.name or b.qualified_name in installed for b in bindings.values())


def _bound(binding: Binding, recorded: tuple[RecordedSchema, ...], installed: Mapping[str, str]) -> Operator:
    """Check the live schema of a binding and fix how its arguments are passed."""
    if not binding.name:
        return Operator(binding=binding, schema=None, positional=())
    live = installed[binding.qualified_name]
    known = [r for r in recorded if (r.provider, r.qualified_name) == (binding.provider, binding.qualified_name)]
    match = next((r for r in known if same_contract(r.text, live)), None)
    if match is None:
        expected = " or ".join(r.text for r in known)
        raise ConfigError(
            f"{binding.qualified_name} of {binding.provider}: expected the schema {expected}, got {live}; install a "
            "release with the recorded schema",
            field=binding.qualified_name,
            expected=expected,
            got=live,
        )
    leading = [a.name for a in parse_text(match.text).arguments if not a.kwarg_only and not a.has_default_value()]
    return Operator(binding=binding, schema=match, positional=tuple(leading))
