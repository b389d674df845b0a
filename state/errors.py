"""The one error tree of purestep.

Every leaf is also a builtin, so that ``except ValueError`` written by a caller who does not know purestep still
works. A message says where, what was expected, what was got and what to do; the values are attributes as well.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DtypeError",
    "PurestepError",
    "RankError",
    "RequestError",
    "ShapeError",
    "StateBusyError",
]


class PurestepError(Exception):
    """Base of everything that purestep raises on purpose.

    Args:
        message: where, expected, got, what to do.
        field: the argument, field or tensor that is wrong, by name.
        expected: what would have been right.
        got: what was there.
    """

    def __init__(self, message: str, *, field: str | None = None, expected: Any = None, got: Any = None) -> None:
        super().__init__(message)
        self.field = field
        self.expected = expected
        self.got = got


class ConfigError(PurestepError, ValueError):
    """A model, capacity or numerics setting that purestep cannot honour."""


class ShapeError(PurestepError, ValueError):
    """A tensor or sequence of the wrong shape."""


class RequestError(PurestepError, ValueError):
    """A request that does not exist, is finished, or was asked for something impossible."""


class DtypeError(PurestepError, TypeError):
    """A tensor or number of the wrong type."""


class CheckpointError(PurestepError, RuntimeError):
    """A checkpoint that is missing parts, damaged, or not a DeepSeek-V4 model."""


class CapacityError(PurestepError, RuntimeError):
    """A pool is too small for what was asked; nothing was changed."""


class RankError(PurestepError, RuntimeError):
    """Another rank is lost or late, could not go on, or has decided otherwise; no rank has a new state."""


class StateBusyError(PurestepError, RuntimeError):
    """A state's buffers were asked for while a step is writing them."""
