"""From a folder to a model: checkpoint, numeric choices, kernel table, tokenizer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Final

import attrs
import tokenizers
import torch
from torch import Tensor

from ..ops.dispatch import Ops, kernel_table, with_stored
from ..state.config import Config
from ..state.errors import CheckpointError, ConfigError
from ..state.numerics import Numerics
from ..state.parallel import Parallel
from .ascend import kernel_params
from .checkpoint import read_checkpoint
from .fingerprint import fingerprint
from .leaves import expanded, has_stored, params_from_leaves, weights_from_params
from .model import Model
from .params import Params
from .ranks import Ranks, join_ranks
from .stop_tokens import stop_tokens
from .variants import numeric_ops

__all__ = ["build_model", "is_widened", "load_model", "model_folder"]

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes that activations and caches may have, by name."""

_STREAMS: Final = 4
"""Residual streams that the kernels of mHC take."""

_A3_NUMERICS: Final = (Numerics.ascend(), Numerics.ascend(int8_weights=True))
_A5_NUMERICS: Final = tuple(
    Numerics.ascend_a5(mx_output=output, mx_experts=experts) for output in (True, False) for experts in (True, False)
)
"""What Ascend kernels can compute."""

EMBEDDED: Final = "tiny"
"""The name of the checkpoint that comes with the package."""


def model_folder(path: str | PathLike[str]) -> Path:
    """Return the folder of a checkpoint; "tiny" is the embedded one unless such a folder exists."""
    folder = Path(path)
    return Path(__file__).parent / EMBEDDED if str(path) == EMBEDDED and not folder.is_dir() else folder


def load_model(
    path: str | PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    numerics: Numerics | None = None,
    kernels: str | None = None,
    chip: str | None = None,
    parallel: Parallel | None = None,
    stored: bool | None = None,
    layers: Iterable[int] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Model:
    """Load a DeepSeek-V4 checkpoint.

    Args:
        path: "tiny", or a folder with ``config.json``, ``*.safetensors`` and perhaps ``tokenizer.json``,
            ``tokenizer_config.json`` and ``generation_config.json``, of which the tokens that end a text are read.
        dtype: "float32" or "bfloat16"; default the checkpoint's own. Given, it is that of all weights: those that the
            checkpoint keeps in FP8 or FP4 are expanded while loading. Official numerics then no longer round the rows
            that meet them; ``activation_qdq=True`` does.
        numerics: default ``Numerics.plain()`` in float32 and ``Numerics.official()`` in bfloat16; Ascend kernels have
            ``Numerics.ascend()``, the A5 ``Numerics.ascend_a5()``, and no others.
        kernels: "reference" or "fused", or "ascend", whose packages are then imported; default the fastest that the
            device and the numerics have.
        chip: generation of an Ascend device, "a2", "a3" or "a5"; with Ascend kernels, and only with them.
        parallel: the layout over ranks, each of which calls this and reads its own part of the weights; default one
            rank. More need ``torch.distributed.init_process_group`` before.
        stored: whether FP8 and FP4 weights stay so in memory and are expanded where they are used; default where no
            ``dtype`` is given. Ascend kernels, and parts of weights on several ranks, take expanded ones.
        layers: load these layers alone, such as ``range(0, 4)``, as a model of their own; default all.
        progress: called as (weights read, weights in all, name) while loading.
    Returns:
        The model.
    Raises:
        CheckpointError: parts are missing, damaged or of another model.
        ConfigError: a setting that this version cannot honour, or a layout of other ranks than there are.
        RankError: other ranks did not come.
    """
    ranks = join_ranks(parallel or Parallel())
    chosen = None if dtype is None else _dtype(dtype)
    folder = model_folder(path)
    keep = False if kernels == "ascend" else stored
    config, params = read_checkpoint(folder, dtype=chosen, stored=keep, layers=layers, progress=progress, ranks=ranks)
    tokenizer_file = folder / "tokenizer.json"
    tokenizer = _read_tokenizer(tokenizer_file) if tokenizer_file.is_file() else None
    config = attrs.evolve(config, eos_token_id=stop_tokens(folder, config, tokenizer))
    dtype = chosen or _dtype(config.torch_dtype)
    model = build_model(config, params, dtype=dtype, numerics=numerics, kernels=kernels, chip=chip, ranks=ranks)
    return attrs.evolve(model, tokenizer=tokenizer)


def build_model(
    config: Config,
    params: Params,
    *,
    dtype: torch.dtype = torch.float32,
    numerics: Numerics | None = None,
    kernels: str | None = None,
    chip: str | None = None,
    ranks: Ranks | None = None,
) -> Model:
    """Put a model together from weights in memory.

    Args:
        config: the numbers.
        params: the weights, in ``dtype`` (f32 parts in f32), or as a release stores them.
        dtype: of activations and caches.
        numerics: default as in ``load_model``.
        kernels: default as in ``load_model``.
        chip: as in ``load_model``.
        ranks: this process's place in a layout, whose part ``params`` is; then all ranks call this together.
    Raises:
        ConfigError: settings that do not go together, or operators that are not what was recorded of them.
    """
    ranks = ranks or Ranks()
    if kernels == "ascend":
        if ranks.world.size > 1:
            raise ConfigError(
                f"parallel: expected one rank with Ascend kernels (they know no layouts), got {ranks.world.size}",
                field="parallel",
                expected=1,
                got=ranks.world.size,
            )
        return _ascend_model(config, _widened(expanded(params, dtype)), dtype, numerics, chip)
    if chip is not None:
        raise ConfigError(
            f"chip: expected None without Ascend kernels, got {chip!r}", field="chip", expected=None, got=chip
        )
    if numerics is not None and (numerics.int8_weights or numerics.mx_output or numerics.mx_experts):
        raise ConfigError(
            "numerics: int8 weights and MX blocks need Ascend kernels; give kernels='ascend', or numerics without them",
            field="numerics",
            expected="int8_weights=False, mx_output=False, mx_experts=False",
            got=numerics,
        )
    normalised = numerics is not None and numerics.probability_rounding == "normalised"
    if ranks.parallel.dcp > 1 and numerics is not None and (numerics.invariant or normalised):
        raise ConfigError(
            "numerics: expected invariant=False and probabilities that are not normalised before they are rounded with "
            "dcp, which sees a part of the entries at a time; use dcp=1",
            field="numerics",
            expected="invariant=False",
            got=numerics,
        )
    if numerics is None:
        numerics = Numerics.plain() if dtype is torch.float32 else Numerics.official()
    ops: Ops = kernel_table(kernels, params.embed.device.type, invariant=numerics.invariant)
    is_stored = has_stored(params)
    ops = numeric_ops(with_stored(ops) if is_stored else ops, numerics, dtype, is_stored=is_stored)
    model = Model(config=config, params=_widened(params), numerics=numerics, ops=ops, dtype=dtype, ranks=ranks)
    return attrs.evolve(model, fingerprint=fingerprint(model)) if ranks.world.size > 1 else model


def _ascend_model(
    config: Config, params: Params, dtype: torch.dtype, numerics: Numerics | None, chip: str | None
) -> Model:
    """Put a model on the kernels that are installed."""
    is_a5 = chip == "a5"
    choices = _A5_NUMERICS if is_a5 else _A3_NUMERICS
    named = "Numerics.ascend_a5(), with MX blocks or not" if is_a5 else "Numerics.ascend(), with int8 weights or not"
    required = {
        "chip": (chip is not None, "a2, a3 or a5", chip),
        "dtype": (dtype is torch.bfloat16, torch.bfloat16, dtype),
        "numerics": (numerics in (None, *choices), named, numerics),
        "hc_mult": (config.hc_mult == _STREAMS, _STREAMS, config.hc_mult),
    }
    for field, (is_right, expected, got) in required.items():
        if not is_right:
            raise ConfigError(
                f"{field}: expected {expected} with Ascend kernels, got {got}", field=field, expected=expected, got=got
            )
    # Nothing of Ascend is imported unless it is asked for.
    providers = import_module("..ops.ascend.providers", __package__)
    adapters = import_module("..ops.ascend.kernels", __package__)
    providers.import_packages()
    chosen = providers.choose_providers(chip, providers.installed_schemas())
    ops: Ops = adapters.ascend_ops(chosen)
    plain = adapters.fallbacks(chosen)
    if plain:
        warnings.warn(
            f"kernels: no installed package has Ascend kernels for {', '.join(plain)}; plain functions run instead",
            stacklevel=3,
        )
    if numerics is None:
        has_blocks = is_a5 and adapters.takes_mx_output(chosen)
        numerics = Numerics.ascend_a5(mx_output=has_blocks) if is_a5 else Numerics.ascend()
    for field, takes in (
        ("int8_weights", adapters.takes_int8),
        ("mx_output", adapters.takes_mx_output),
        ("mx_experts", adapters.takes_mx_experts),
    ):
        if getattr(numerics, field) and not takes(chosen):
            raise ConfigError(
                f"numerics: expected kernels for {field.replace('_', ' ')}, missing are {', '.join(chosen.missing)}; "
                f"install the packages that have them, or leave {field} out",
                field="numerics",
                expected=f"kernels for {field}",
                got=chosen.missing,
            )
    params = kernel_params(config, params, dtype, numerics)
    return Model(config=config, params=params, numerics=numerics, ops=ops, dtype=dtype)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = dtype if isinstance(dtype, torch.dtype) else DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None or found not in DTYPES.values():
        raise ConfigError(
            f"dtype: expected one of {', '.join(DTYPES)}, got {dtype}", field="dtype", expected=tuple(DTYPES), got=dtype
        )
    return found


def _read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a damaged file
        raise CheckpointError(
            f"{file}: expected a tokenizer in Hugging Face's format, got: {error}", field=file.name
        ) from error


def is_widened(path: str) -> bool:
    """Tell whether a weight is kept in f32 whatever the model's dtype, because it is computed in f32.

    Args:
        path: of the weight in ``Params``.
    """
    return re.fullmatch(r"head|(.*\.)?(attn_|ffn_|q_|kv_)?norm|.*\.compressor\.w(kv|gate)|.*\.gate", path) is not None


def _widened(params: Params) -> Params:
    """Store in f32 what is computed in f32: norms, router, compressor projections, head.

    Widening changes no value, so this moves a conversion from every step to the load.
    """
    weights = weights_from_params(params)
    wide = {path: w.float() if isinstance(w, Tensor) and is_widened(path) else w for path, w in weights.items()}
    return params_from_leaves(wide)
