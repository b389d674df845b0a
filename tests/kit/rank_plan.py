"""What the ranks of a test of plans run: a real decode of the embedded model, whose collectives are counted."""

from __future__ import annotations

import purestep as ps
import torch
from purestep.model.forward import layer_operands, run_model
from purestep.serving.plan_counters import Collective, StepCounter
from purestep.state.shares import RowShares

__all__ = ["CONTEXT", "REQUESTS", "watched_step"]

REQUESTS = 2
CONTEXT = 1060
"""More entries than the embedded model picks, so that its index scores are exchanged."""


def watched_step(parallel: ps.Parallel) -> tuple[Collective, ...]:
    """Run the layers of a decode on this rank, over empty caches."""
    model = ps.load_model("tiny", parallel=parallel)
    state = ps.init_state(model, ps.Capacity(requests=REQUESTS, tokens=REQUESTS * 1152, context=1152))
    for _ in range(REQUESTS):
        state, _ = ps.open_request(state)
    state, _ = ps.prepare_extend(state, {i: [3] * (CONTEXT - 1) for i in range(REQUESTS)})
    state, _ = ps.commit(state, None)
    state, batch = ps.prepare_extend(state, {i: [4] for i in range(REQUESTS)})
    rows = (REQUESTS,) * parallel.dp
    shares = RowShares(tokens=rows, logits=rows, is_extend=False, tp=parallel.tp)
    view = ps.forward_batch(state, batch, shares=shares)
    specs = {name: state.kv.handle.spec(name) for name in state.kv.handle.names}
    buffers = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype, _) in specs.items()}
    operands = layer_operands(model, state.kv.layout, view)
    groups = {str(group.name): group.size for group in (model.ranks.world, model.ranks.attn)}
    with StepCounter(groups, {}) as counter, torch.no_grad():
        run_model(model, buffers, state.kv.layout, view, operands)
    return counter.collectives
