"""How a model is spread over ranks."""

from __future__ import annotations

import attrs

from .errors import ConfigError

__all__ = ["Parallel"]


@attrs.frozen(kw_only=True)
class Parallel:
    """A layout over ranks; this version runs on one.

    Attributes:
        tp: tensor-parallel ranks.
        dp: data-parallel attention replicas.
    Raises:
        ConfigError: more than one rank.
    """

    tp: int = 1
    dp: int = 1

    def __attrs_post_init__(self) -> None:
        if (self.tp, self.dp) != (1, 1):
            raise ConfigError(
                f"Parallel: expected tp=1 and dp=1 (this version runs on one rank), got tp={self.tp}, dp={self.dp}",
                field="parallel",
                expected=(1, 1),
                got=(self.tp, self.dp),
            )
