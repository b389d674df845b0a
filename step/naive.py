"""Requests as lists of token ids, and their logits computed anew: what the machines compare with.

Source: none; a recomputation keeps nothing, so nothing can go stale in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor

from ..model.model import Model
from ..model.sequence import forward_sequence

__all__ = ["Text", "maximal", "recompute"]


@attrs.frozen
class Text:
    """The naive model of a request: what it was given and what it said.

    Attributes:
        ids: every token so far.
        n_fed: how many of them have been fed.
        said: positions of the sampled ones.
        is_over: whether it has finished.
        is_parked: whether it was retracted and waits.
        n_kept: tokens that the last cut kept.
    """

    ids: tuple[int, ...] = ()
    n_fed: int = 0
    said: tuple[int, ...] = ()
    is_over: bool = False
    is_parked: bool = False
    n_kept: int = 0

    @property
    def has_unfed(self) -> bool:
        """Whether some token waits to be fed."""
        return len(self.ids) > self.n_fed

    @property
    def has_pending(self) -> bool:
        """Whether the last token was sampled and waits to be fed."""
        last = len(self.ids) - 1
        return self.has_unfed and self.said[-1:] == (last,) and last >= self.n_kept

    def forced(self, token_id: int) -> tuple[int, ...]:
        """Return the ids with ``token_id`` in the place of the pending one, or behind all of them."""
        return (*(self.ids[:-1] if self.has_pending else self.ids), token_id)

    def fed(self, ids: tuple[int, ...], sampled: Sequence[int], is_over: bool) -> Text:
        """Return the text after a step that fed ``ids`` and sampled one token or none."""
        said = (*(at for at in self.said if at < len(ids)), *range(len(ids), len(ids) + len(sampled)))
        return Text(ids=(*ids, *sampled), n_fed=len(ids), said=said, is_over=is_over, n_kept=self.n_kept)

    def cut(self, n: int, n_fed: int) -> Text:
        """Return the text with its first ``n`` tokens, ``n_fed`` of them fed; whole, it stays as it is."""
        if n == len(self.ids):
            return self
        said = tuple(at for at in self.said if at < n)
        return Text(ids=self.ids[:n], n_fed=n_fed, said=said, is_parked=self.is_parked, n_kept=n)

    def parked(self) -> Text:
        """Return the text of a request that was retracted."""
        return attrs.evolve(self, n_fed=0, is_parked=True)


def maximal(texts: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Keep the sequences that no other one continues."""
    kept: list[tuple[int, ...]] = []
    for ids in sorted(texts, key=len, reverse=True):
        if not any(longer[: len(ids)] == ids for longer in kept):
            kept.append(ids)
    return kept


@torch.no_grad()
def recompute(model: Model, texts: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Compute the logits that follow each of several sequences, without a cache.

    Args:
        model: the model.
        texts: token ids, at least one each.
    Returns:
        f32[V] for each of them, on the host.
    """
    if not texts:
        return []
    longest = maximal(texts)
    width = max(len(ids) for ids in longest)
    # What stands behind a sequence cannot influence it, so all of them go in one batch.
    padded = torch.tensor([(*ids, *(0,) * (width - len(ids))) for ids in longest])
    logits = forward_sequence(model, padded.to(model.device)).cpu()
    sources = [next(i for i, text in enumerate(longest) if text[: len(ids)] == ids) for ids in texts]
    return [logits[source, len(ids) - 1] for source, ids in zip(sources, texts, strict=True)]
