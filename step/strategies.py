"""Hypothesis strategies and a state machine for tests of this engine, or of code that builds on it.

Import it as ``purestep.strategies``; it needs Hypothesis, which comes with the test extra.

Source: decode-path sheet, section 9 (what histories are checked against); strategies have no counterpart upstream.
"""

from __future__ import annotations

from .histories import PAGE_SIZES as PAGE_SIZES
from .histories import Operation as Operation
from .histories import capacities as capacities
from .histories import interrupted as interrupted
from .histories import lengths as lengths
from .histories import operations as operations
from .histories import page_sizes as page_sizes
from .histories import prompts as prompts
from .histories import run_operation as run_operation
from .histories import sampling_params as sampling_params
from .histories import states as states
from .machine import DecodeMachine as DecodeMachine

__all__ = [
    "PAGE_SIZES",
    "DecodeMachine",
    "Operation",
    "capacities",
    "interrupted",
    "lengths",
    "operations",
    "page_sizes",
    "prompts",
    "run_operation",
    "sampling_params",
    "states",
]
