"""One request as a value of its own: what it said and read, and what its caches hold, without any pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor

from .decode import Request
from .sampling import SamplingRow
from .values import value

__all__ = ["ExportedRequest"]


@value
@attrs.frozen(eq=False, kw_only=True)
class ExportedRequest:
    """A request taken out of a state; it belongs to a model, not to a batch, a page size or a pool.

    Attributes:
        model: configuration, fingerprint, dtype and numerics of the model that computed the caches.
        request: its record, with row 0; window entries exist from ``evicted_len`` on.
        sampling: its parameters, seed and counts.
        caches: buffer -> float[L,C,D], one entry per position, group or ring place that is still needed: ``swa`` from
            ``evicted_len`` on, ``c4``, ``index`` and ``c128`` from the start, the pooling states of the open groups.
    """

    model: Mapping[str, Any]
    request: Request
    sampling: SamplingRow
    caches: Mapping[str, Tensor]
