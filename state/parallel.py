"""How a model is spread over ranks.

Source: SGLang 0.5.23 ``layers/dp_attention.py`` (the groups); decode-path sheet 7.2. There ``tp`` counts all ranks and
the attention group is ``tp / dp``; here ``tp`` is the attention group itself, so that all ranks are ``tp * dp``.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from .errors import ConfigError

__all__ = ["Parallel"]


@attrs.frozen(kw_only=True)
class Parallel:
    """A layout over ranks; rank ``d * tp + t`` is the ``t``-th of replica ``d``.

    Attributes:
        tp: ranks that share the attention of one replica: its heads, output groups, index heads, embedding rows.
        dp: replicas of the attention; each has requests, pools and state of its own.
        ep: ranks that whole experts are dealt to; with ``moe="ep"`` all of them.
        moe: "tp" splits every expert over all ranks, "ep" deals whole experts to them.
        dp_lm_head: split the head over the ranks of a replica only, so that no rows are gathered for it.
        lm_head_all_to_all: where the head is split over all ranks and row counts are equal, exchange its output in one
            all-to-all instead of gathering the vocabulary and handing back the rows.
        capacity: token rows that any rank may send to another in one exchange of ``moe="ep"``; a step with more is
            refused. None sends as many as there are, which the host has to count.
        placement: place of every expert, a permutation of the experts for every layer, or () for places by number:
            rank r holds places ``r * E / ep`` to ``(r + 1) * E / ep - 1``. With ``moe="ep"``.
        dcp: ranks that a request's caches are dealt to, in blocks of a page's share: 1, or all ranks of a replica.
        sync_token_ids: let the ranks of a replica agree on every sampled token by taking the smallest.
        timeout_s: seconds that a rank waits for the others in any exchange.
        pp: pipeline stages; there are none.
    Raises:
        ConfigError: a layout that does not exist.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    moe: Literal["tp", "ep"] = "tp"
    dp_lm_head: bool = False
    lm_head_all_to_all: bool = False
    capacity: int | None = None
    placement: tuple[tuple[int, ...], ...] = ()
    dcp: int = 1
    sync_token_ids: bool = False
    timeout_s: float = 60.0
    pp: int = 1

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.tp * self.dp

    def __attrs_post_init__(self) -> None:
        for field in ("tp", "dp", "ep", "dcp", "pp"):
            n = getattr(self, field)
            _require(isinstance(n, int) and not isinstance(n, bool) and n >= 1, field, "an integer from 1 up", n)
        _require(self.pp == 1, "pp", "1: there is no pipeline parallelism; split the model by tp, dp and ep", self.pp)
        _require(self.dcp in (1, self.tp), "dcp", f"1, or tp = {self.tp}", self.dcp)
        _require(self.moe in ("tp", "ep"), "moe", '"tp" or "ep"', self.moe)
        n_holders = self.ranks if self.moe == "ep" else 1
        _require(
            self.ep == n_holders,
            "ep",
            f'{n_holders} with moe="{self.moe}", tp={self.tp}, dp={self.dp} (experts are dealt to all ranks or none)',
            self.ep,
        )
        _require(
            not (self.dp_lm_head and self.lm_head_all_to_all),
            "lm_head_all_to_all",
            "False with dp_lm_head, whose rows never leave their replica",
            self.lm_head_all_to_all,
        )
        _require(
            not self.lm_head_all_to_all or (self.tp == 1 and self.dp > 1),
            "lm_head_all_to_all",
            "False, or tp=1 with dp > 1: every rank must own rows of its own",
            self.lm_head_all_to_all,
        )
        _require(self.capacity is None or self.moe == "ep", "capacity", 'None without moe="ep"', self.capacity)
        _require(self.capacity is None or self.capacity >= 1, "capacity", "None or at least one row", self.capacity)
        _require(not self.placement or self.moe == "ep", "placement", '() without moe="ep"', self.placement)
        wrong = next((one for one in self.placement if sorted(one) != list(range(len(one)))), None)
        _require(wrong is None, "placement", "a permutation of the experts for every layer", wrong)
        _require(self.timeout_s > 0, "timeout_s", "seconds, more than 0", self.timeout_s)


def _require(is_right: bool, field: str, expected: str, got: Any) -> None:
    if not is_right:
        raise ConfigError(
            f"Parallel({field}): expected {expected}, got {got!r}", field=field, expected=expected, got=got
        )
