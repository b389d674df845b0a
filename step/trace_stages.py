"""How one stage of a traced step is written down.

Source: none; the questions are those of the decode-path sheet, section 10.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import attrs

from .trace_values import NO_PART, NOT_HERE, ONE_RANK, UNCHANGED, Access, Choice, ExpertRows, Shape, TraceStage

__all__ = ["StageWriter"]


@attrs.frozen(eq=False, kw_only=True)
class StageWriter:
    """Fills in what all stages of a step have in common.

    Attributes:
        axes: letter -> number.
        request_ids: by token row.
        positions: by token row.
    """

    axes: Mapping[str, int]
    request_ids: tuple[int, ...]
    positions: tuple[int, ...]

    def stage(
        self,
        name: str,
        title: str,
        shapes: Sequence[str],
        *,
        layer: int | None = None,
        reads: Iterable[Access] = (),
        writes: Iterable[Access] = (),
        ownership: str = UNCHANGED,
        shards: str = ONE_RANK,
        vocabulary: str = NOT_HERE,
        next_input: str = NO_PART,
        choices: Iterable[Choice] = (),
        experts: Iterable[ExpertRows] = (),
        extra: Mapping[str, int] | None = None,
    ) -> TraceStage:
        """Describe one stage; what is not given does not happen in it.

        Args:
            name: without the layer.
            title: as in ``TraceStage``, and so are the others.
            shapes: tokens of the tensor before, in between and after.
            extra: numbers of axes that only this stage has.
        """
        axes = {**self.axes, **(extra or {})}
        return TraceStage(
            name=name if layer is None else f"{layer}.{name}",
            layer=layer,
            title=title,
            n_tokens=len(self.positions),
            shapes=tuple(_shape(token, axes) for token in shapes),
            request_ids=self.request_ids,
            positions=self.positions,
            reads=tuple(reads),
            writes=tuple(writes),
            ownership=ownership,
            shards=shards,
            vocabulary=vocabulary,
            next_input=next_input,
            choices=tuple(choices),
            experts=tuple(experts),
        )


def _shape(token: str, axes: Mapping[str, int]) -> Shape:
    inside = token[token.index("[") + 1 : -1]
    return Shape(
        token=token, sizes=tuple(prod(axes[letter] for letter in axis.split("*")) for axis in inside.split(","))
    )
