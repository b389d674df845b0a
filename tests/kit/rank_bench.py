"""What the ranks of the benchmark of layouts run: decode steps, timed, and one more whose collectives are counted."""

from __future__ import annotations

import statistics
import time

import attrs
import purestep as ps
import torch
from kit.steps import ENDLESS
from purestep.serving.plan_counters import Collective, StepCounter

__all__ = ["Measured", "measure"]


@attrs.frozen
class Measured:
    """One rank's decode steps: median milliseconds, and what one step exchanged."""

    milliseconds: float
    collectives: tuple[Collective, ...]


def measure(parallel: ps.Parallel, folder: str, batch: int, context: int, steps: int) -> Measured:
    """Prefill ``batch`` requests of this rank's replica and decode them.

    Args:
        parallel: the layout.
        folder: of the checkpoint.
        batch: requests of each replica.
        context: tokens of each before the first decode.
        steps: decodes to time.
    """
    torch.set_num_threads(1)
    model = ps.load_model(folder, parallel=parallel, dtype="float32")
    room = -(-(context + steps + 2) // 128) * 128
    state = ps.init_state(model, ps.Capacity(requests=batch, tokens=batch * room, context=room))
    generator = torch.Generator().manual_seed(0)
    prompts = {}
    for _ in range(batch):
        state, request = ps.open_request(state, ENDLESS)
        prompts[request] = torch.randint(model.config.vocab_size, (context,), generator=generator).tolist()
    state, _ = ps.extend_step(model, state, prompts)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        state, _ = ps.decode_step(model, state)
        seconds.append(time.perf_counter() - start)
    groups = {str(group.name): group.size for group in (model.ranks.world, model.ranks.attn) if group.size > 1}
    with StepCounter(groups, {}) as counter:
        ps.decode_step(model, state)
    return Measured(statistics.median(seconds) * 1e3, counter.collectives)
