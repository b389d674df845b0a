"""Random histories over the public functions: invariants, purity, branches, interrupts, equality with a recompute."""

from __future__ import annotations

import purestep as ps
from hypothesis import settings
from kit.models import tiny_model
from kit.steps import examples


class Machine(ps.strategies.DecodeMachine):
    """Steps tiny models with every mix of layer kinds and four windows."""

    models = (
        tiny_model((0, 4, 128), window=8),
        tiny_model((4, 128), window=16),
        tiny_model((4, 0), window=128),
        tiny_model((128,), window=5),
    )


TestMachine = Machine.TestCase
TestMachine.settings = settings(examples(60), stateful_step_count=settings().stateful_step_count // 2)
