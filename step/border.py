"""The border of a step: does the state belong to the model, and is it ours for the length of the step?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..model.model import Model
from ..state.decode import DecodeState
from ..state.errors import ConfigError
from .announce import told_to_ranks

__all__ = ["owned_step"]


@contextmanager
def owned_step(model: Model, state: DecodeState) -> Iterator[None]:
    """Hold the state's buffers for a whole step.

    Args:
        model: the model that steps.
        state: the state that is stepped.
    Raises:
        ConfigError: the state was made for another configuration, other numerics, another dtype or other kernels.
    """
    with told_to_ranks(model):
        _check_fit(model, state)
    with state.table.handle.exclusive(), state.kv.handle.exclusive():
        yield


def _check_fit(model: Model, state: DecodeState) -> None:
    held = state.kv.dtype
    if state.config is not model.config and state.config != model.config:
        raise ConfigError(
            "state: was made for a model with another configuration; build it with init_state(model, capacity)",
            field="config",
            expected=model.config,
            got=state.config,
        )
    if state.numerics is not model.numerics and state.numerics != model.numerics:
        raise ConfigError(
            "state: its caches were computed with other numerics than the model's; build it with "
            "init_state(model, capacity)",
            field="numerics",
            expected=model.numerics,
            got=state.numerics,
        )
    if held != model.dtype:
        raise ConfigError(
            f"state: expected caches in {model.dtype}, got {held}; build it with init_state(model, capacity)",
            field="dtype",
            expected=model.dtype,
            got=held,
        )
    model.require_form(state.kv.layout.form)
