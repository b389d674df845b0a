"""Hypothesis strategies and machines for tests of this engine, of code that builds on it, or of another engine.

Reach it as ``ps.strategies`` after ``import purestep as ps``; it needs Hypothesis, which comes with the test extra.

Source: decode-path sheet, section 9 (what histories are checked against); strategies have no counterpart upstream.
"""

from __future__ import annotations

from .decode_machine import DecodeMachine as DecodeMachine
from .engine import CanClose as CanClose
from .engine import CanFork as CanFork
from .engine import CanPersist as CanPersist
from .engine import CanRetract as CanRetract
from .engine import CanRewind as CanRewind
from .engine import Engine as Engine
from .engine import PurestepEngine as PurestepEngine
from .histories import PAGE_SIZES as PAGE_SIZES
from .histories import Operation as Operation
from .histories import batches as batches
from .histories import capacities as capacities
from .histories import drops as drops
from .histories import interrupted as interrupted
from .histories import lengths as lengths
from .histories import operations as operations
from .histories import page_sizes as page_sizes
from .histories import prompts as prompts
from .histories import run_operation as run_operation
from .histories import sampling_params as sampling_params
from .histories import states as states
from .state_machine import StateMachine as StateMachine
from .tiny_checkpoints import TinyCheckpoint as TinyCheckpoint
from .tiny_checkpoints import checkpoints as checkpoints
from .tiny_configs import configs as configs
from .tiny_configs import tiny_config as tiny_config

__all__ = [
    "PAGE_SIZES",
    "CanClose",
    "CanFork",
    "CanPersist",
    "CanRetract",
    "CanRewind",
    "DecodeMachine",
    "Engine",
    "Operation",
    "PurestepEngine",
    "StateMachine",
    "TinyCheckpoint",
    "batches",
    "capacities",
    "checkpoints",
    "configs",
    "drops",
    "interrupted",
    "lengths",
    "operations",
    "page_sizes",
    "prompts",
    "run_operation",
    "sampling_params",
    "states",
    "tiny_config",
]
