"""The inner stages of a step that can be seen, replaced and recorded, and the kind of function that does so.

A *tap* is called with the name of a stage and the tensor that the model has computed there, one row per token; what it
returns is used instead. Seeing, forcing and changing are all taps, and are passed down as arguments. A full name is
``3.attn.input``: layer, then stage; ``layer`` and what it calls hand their tap the stage alone.

Source: none; the names of the parts are those of DeepSeek-V4 ``inference/model.py``, ``Block``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs
from torch import Tensor

from ..state.capacity import C4_RATIO
from ..state.config import Config
from ..state.errors import RequestError

__all__ = ["STAGES", "Stage", "Tap", "full_names", "layer_tap", "split_name", "stage_layers", "untapped"]

Tap = Callable[[str, Tensor], Tensor]
"""(name of the stage, its tensor) -> tensor to use instead, of the same shape and dtype."""


@attrs.frozen(kw_only=True)
class Stage:
    """What one stage is.

    Attributes:
        shape: token of its tensor.
        what: in a few words.
        ratio: compress ratio of the layers that have it; None where all have it.
        is_in_layers: whether it belongs to a layer; if not, its name is full without a number.
        is_choice: whether it holds choices, which a replay forces.
    """

    shape: str
    what: str
    ratio: int | None = None
    is_in_layers: bool = True
    is_choice: bool = False


STAGES: Final[Mapping[str, Stage]] = MappingProxyType(
    {
        "streams": Stage(shape="float[T,M,H]", what="residual streams entering the layer"),
        "attn.input": Stage(shape="float[T,H]", what="normed input of the attention sublayer"),
        "attn.picks": Stage(
            shape="i64[T,P]",
            what="entries that the query reads, ascending, then -1; all visible ones when they fit",
            ratio=C4_RATIO,
            is_choice=True,
        ),
        "attn.heads": Stage(shape="float[T,N,D]", what="attention output of every head before its projection"),
        "attn.output": Stage(shape="float[T,H]", what="output of the attention sublayer"),
        "ffn.streams": Stage(shape="float[T,M,H]", what="residual streams entering the expert sublayer"),
        "ffn.input": Stage(shape="float[T,H]", what="normed input of the expert sublayer"),
        "ffn.router_logits": Stage(shape="f32[T,E]", what="router logits of every expert"),
        "ffn.expert_ids": Stage(
            shape="i64[T,K]", what="chosen experts, by score or by token id (hash layers)", is_choice=True
        ),
        "ffn.expert_weights": Stage(shape="f32[T,K]", what="weights of the chosen experts"),
        "ffn.output": Stage(shape="float[T,H]", what="output of the expert sublayer"),
        "final.streams": Stage(shape="float[T,M,H]", what="residual streams after the last layer", is_in_layers=False),
    }
)
"""Every stage by its name without layer, in the order in which a layer reaches them."""


def untapped(name: str, x: Tensor) -> Tensor:
    """Use what the model has computed: the tap of a step that nobody looks into.

    Args:
        name: of the stage.
        x: its tensor.
    Returns:
        ``x`` itself.
    """
    return x


def layer_tap(tap: Tap, layer: int) -> Tap:
    """Make the tap of one layer, which is called with stages alone.

    Args:
        tap: takes full names.
        layer: 0 to L-1.
    Returns:
        The tap to hand to the layer; ``untapped`` stays itself.
    """
    if tap is untapped:
        return untapped
    return lambda stage, x: tap(f"{layer}.{stage}", x)


def stage_layers(config: Config, stage: str) -> tuple[int, ...]:
    """List the layers that have a stage; none for a stage outside the layers."""
    kind = STAGES[stage]
    if not kind.is_in_layers:
        return ()
    return tuple(i for i, ratio in enumerate(config.compress_ratios) if kind.ratio in (None, ratio))


def split_name(name: str) -> tuple[int | None, str]:
    """Split a full name into (layer or None, stage)."""
    layer, _, stage = name.partition(".")
    return (int(layer), stage) if layer.isdecimal() else (None, name)


def full_names(config: Config, names: Iterable[str], field: str) -> tuple[str, ...]:
    """Resolve stage names, with or without layer, into full names, each once.

    Args:
        config: the model's numbers.
        names: a name without layer means all layers that have it.
        field: argument that the names come from, for messages.
    Returns:
        Full names in the order given.
    Raises:
        RequestError: a name or layer that the model does not have.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise RequestError(
            f"{field}: expected several stage names, got {names!r}; write ({names!r},)",
            field=field,
            expected="an iterable of names",
            got=names,
        )
    return tuple(dict.fromkeys(full for name in names for full in _resolve(config, name, field)))


def _resolve(config: Config, name: Any, field: str) -> tuple[str, ...]:
    layer, stage = split_name(name) if isinstance(name, str) else (None, name)
    if stage not in STAGES or (layer is not None and not STAGES[stage].is_in_layers):
        known = ", ".join(STAGES)
        raise RequestError(
            f'{field}: expected stages among {known}, or with a layer in front ("0.streams"), got {name!r}',
            field=field,
            expected=tuple(STAGES),
            got=name,
        )
    layers = stage_layers(config, stage)
    if layer is None:
        return tuple(f"{i}.{stage}" for i in layers) if STAGES[stage].is_in_layers else (stage,)
    if layer not in layers:
        numbers = ", ".join(map(str, layers)) or "none"
        raise RequestError(
            f"{field}: expected a layer that has {stage} ({numbers}), got {name!r}",
            field=field,
            expected=layers,
            got=name,
        )
    return (f"{layer}.{stage}",)
