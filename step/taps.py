"""Capture, replay and edit: the taps of one step, built from values and gone with it.

They are asked in the order replay, edit, capture, so that a capture holds what was used.

Source: none; the stages are those of ``model/stages.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import attrs
import torch
from torch import Tensor

from ..model.stages import Tap, full_names, untapped
from ..state.batch import ScheduleBatch
from ..state.captured import Captured
from ..state.decode import DecodeState
from .edits import Edits, edit_tap
from .replays import Replay, replay_tap
from .token_rows import fed_tokens

__all__ = ["StepTaps", "step_taps"]


@attrs.frozen(eq=False, kw_only=True)
class StepTaps:
    """What looks into one step.

    Attributes:
        tap: for ``forward``.
        batch: the step.
        is_recording: whether stages were asked for.
        taken: full name -> tensor; filled by ``tap`` while the step runs.
    """

    tap: Tap
    batch: ScheduleBatch
    is_recording: bool
    taken: Mapping[str, Tensor]

    def record(self, logits: Tensor, kept: Literal["last", "all", "none"]) -> Captured | None:
        """Put together what was captured, after the forward.

        Args:
            logits: f32[X,V]. What the forward returned.
            kept: for which tokens.
        Returns:
            The record, or None where no stage was asked for.
        """
        if not self.is_recording:
            return None
        tokens = fed_tokens(self.batch)
        last_rows = (self.batch.extend_lens.cumsum() - 1).tolist()
        return Captured(
            request_ids=tuple(request_id for request_id, _ in tokens),
            positions=tuple(position for _, position in tokens),
            stages=dict(self.taken),
            logits=logits,
            logit_rows=tuple({"last": last_rows, "all": range(len(tokens)), "none": ()}[kept]),
        )


def step_taps(
    state: DecodeState,
    batch: ScheduleBatch,
    *,
    capture: Iterable[str],
    replay: Replay | None,
    edit: Edits | None,
) -> StepTaps:
    """Build the taps of one step.

    Args:
        state: that the step runs on.
        batch: the prepared step.
        capture: names of stages to record, with or without layer.
        replay: records whose choices are forced on the tokens that they name.
        edit: request -> stage name -> function of (row, token).
    Returns:
        The tap, and what it will have recorded.
    Raises:
        RequestError: an unknown stage, layer or request, or a recorded choice that its token cannot make.
        ShapeError: a record that does not fit the model.
    """
    asked = capture if isinstance(capture, str) else tuple(capture)
    names = frozenset(full_names(state.config, asked, "capture"))
    taken: dict[str, Tensor] = {}
    taps: list[Tap] = []
    if replay is not None:
        taps.append(replay_tap(state.config, batch, replay))
    if edit is not None:
        taps.append(edit_tap(state, batch, edit))
    if names:
        taps.append(_capture_tap(names, taken))
    return StepTaps(tap=_in_turn(taps), batch=batch, is_recording=bool(asked), taken=taken)


def _in_turn(taps: Sequence[Tap]) -> Tap:
    if not taps:
        return untapped

    def tap(name: str, x: Tensor) -> Tensor:
        for one in taps:
            x = one(name, x)
        return x

    return tap


def _capture_tap(names: frozenset[str], taken: dict[str, Tensor]) -> Tap:
    def tap(name: str, x: Tensor) -> Tensor:
        if name in names:
            taken[name] = x.clone(memory_format=torch.contiguous_format)
        return x

    return tap
