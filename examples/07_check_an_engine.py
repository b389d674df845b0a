"""Check other engines against the reference with a few lines each.

What the reader learns: ``ps.strategies.DecodeMachine`` takes a model and an adapter, runs random histories (prompts,
chunks, decodes, forks, rewinds, retractions) and compares every logits row with a recomputation. Here it tests three
engines of other make: a small one that keeps tokens in shared pages of four and gets through; the same with two faults
of the kinds that engines for this model have had, whose shortest histories it prints; and transformers' ``generate``,
which keeps its cache between calls and gets through.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import purestep as ps
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor
from transformers import DeepseekV4ForCausalLM, DynamicCache
from transformers.utils import logging

# All experts and all index entries are used: where nothing is chosen, no rounding can change a choice.
CONFIG = ps.strategies.tiny_config(
    (4,), hidden=16, heads=2, head_dim=16, vocab=16, window=8, experts=2, topk=2, index_topk=64, yarn_factor=None
) | {"hc_sinkhorn_iters": 4}
CHECKPOINT = ps.strategies.TinyCheckpoint(config=CONFIG, seed=1)
REFERENCE = CHECKPOINT.load()
GROUP = 4
SLOTS, CONTEXT = 2, 24
SETTINGS = settings(
    stateful_step_count=6,
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@cache
def logits_after(ids: tuple[int, ...]) -> Tensor:
    """Stand for a kernel."""
    with torch.no_grad():
        return ps.forward_sequence(REFERENCE, torch.tensor(ids))[-1]


class GroupEngine:
    """An engine that changes itself: closed groups lie in shared pages, the open group in a ring of its slot."""

    def __init__(self) -> None:
        """Make all pages and slots free."""
        self.pages = torch.zeros((SLOTS * CONTEXT // GROUP, GROUP), dtype=torch.int64)
        self.ring = torch.zeros((SLOTS, GROUP), dtype=torch.int64)
        self.refs = [0] * len(self.pages)
        self.tables: list[list[int]] = [[] for _ in range(SLOTS)]
        self.lengths = [0] * SLOTS
        self.free_slots = list(range(SLOTS))

    def open(self) -> int:
        """Take a slot."""
        return self.free_slots.pop(0)

    def extend(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Store tokens and compute from what is stored."""
        for slot, ids in chunks.items():
            for token in ids:
                self.ring[slot, self.lengths[slot] % GROUP] = token
                self.lengths[slot] += 1
                if self.lengths[slot] % GROUP == 0:
                    self._close_group(slot)
        return {slot: logits_after(tuple(self._read(slot).tolist())) for slot in chunks}

    def decode(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        """Store one token each."""
        return self.extend({slot: [token] for slot, token in tokens.items()})

    def fork(self, slot: int, at: int) -> int:
        """Name the other slot's pages too, and copy the group that is open at that token."""
        new = self.open()
        self.tables[new] = self.tables[slot][: at // GROUP]
        for page in self.tables[new]:
            self.refs[page] += 1
        self.lengths[new] = at
        self._copy_open_group(slot, new)
        return new

    def close(self, slot: int) -> None:
        """Give a slot and its pages back."""
        for page in self.tables[slot]:
            self.refs[page] -= 1
        self.tables[slot] = []
        self._reset(slot)
        self.free_slots.insert(0, slot)

    def _close_group(self, slot: int) -> None:
        page = self.refs.index(0)
        self.refs[page] = 1
        self.pages[page] = self.ring[slot]
        self.tables[slot].append(page)

    def _copy_open_group(self, slot: int, new: int) -> None:
        n_closed = len(self.tables[new])
        is_closed = n_closed < len(self.tables[slot])
        self.ring[new] = self.pages[self.tables[slot][n_closed]] if is_closed else self.ring[slot]

    def _reset(self, slot: int) -> None:
        self.lengths[slot] = 0

    def _read(self, slot: int) -> Tensor:
        rest = self.ring[slot, : self.lengths[slot] % GROUP]
        return torch.cat((self.pages[self.tables[slot]].flatten(), rest))


class ForgetsOpenGroup(GroupEngine):
    """A fork takes the whole groups along and forgets the one that is being filled."""

    def _copy_open_group(self, slot: int, new: int) -> None:
        pass


class KeepsOldLength(GroupEngine):
    """A slot starts with the count that its last owner left."""

    def _reset(self, slot: int) -> None:
        pass


class GenerateEngine:
    """transformers' ``generate``, one token at a time; each request keeps its cache."""

    def __init__(self, model: DeepseekV4ForCausalLM) -> None:
        """Start without requests."""
        self.model = model
        self.ids: dict[int, list[int]] = {}
        self.caches: dict[int, DynamicCache] = {}

    def open(self) -> int:
        """Start with an empty cache."""
        handle = len(self.ids)
        self.ids[handle], self.caches[handle] = [], DynamicCache(config=self.model.config)
        return handle

    def extend(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Generate one token after the new ones: it feeds what is not in the cache yet."""
        return {handle: self._generate(handle, ids) for handle, ids in chunks.items()}

    def decode(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        """Feed one token each."""
        return self.extend({handle: [token] for handle, token in tokens.items()})

    def fork(self, handle: int, at: int) -> int:
        """Copy the cache; at an earlier token start with an empty one, which the next call fills."""
        new = self.open()
        self.ids[new] = self.ids[handle][:at]
        if at == len(self.ids[handle]):
            self.caches[new] = copy.deepcopy(self.caches[handle])
        return new

    def retract(self, handle: int) -> None:
        """Drop the cache."""
        self.caches[handle] = DynamicCache(config=self.model.config)

    def _generate(self, handle: int, ids: Sequence[int]) -> Tensor:
        self.ids[handle] += ids
        prompt = torch.tensor([self.ids[handle]])
        out = self.model.generate(
            prompt,
            # Without a mask, generate takes tokens that look like padding for padding.
            attention_mask=torch.ones_like(prompt),
            cache=self.caches[handle],
            max_new_tokens=1,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        return out.logits[0][0]


def check(make: Callable[[], Any], histories: int) -> AssertionError | None:
    """Run the machine on an engine, with so many histories; return what it found."""

    class Machine(ps.strategies.DecodeMachine):
        model = REFERENCE
        engine = make
        requests = SLOTS
        context = CONTEXT

    try:
        run_state_machine_as_test(Machine, settings=settings(SETTINGS, max_examples=histories))
    except AssertionError as error:
        return error
    return None


def load_peer() -> DeepseekV4ForCausalLM:
    """Let transformers load the same checkpoint."""
    logging.disable_progress_bar()
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DeepseekV4ForCausalLM.from_pretrained(CHECKPOINT.write(folder), dtype=torch.float32).eval()


def main() -> None:
    """Check engines that are right and engines that are not."""
    assert check(GroupEngine, 30) is None
    print("GroupEngine: nothing found")
    for faulty in (ForgetsOpenGroup, KeepsOldLength):
        found = check(faulty, 400)
        assert found is not None
        print(f"\n{faulty.__name__}: {faulty.__doc__}\n  {found}")
        print("\n".join(f"    {line}" for note in found.__notes__ for line in note.splitlines()))
    peer = load_peer()
    assert check(lambda: GenerateEngine(peer), 25) is None
    print("\ntransformers' generate: nothing found")
    print("The machine found both planted faults, and none in the two engines that are right.")


if __name__ == "__main__":
    main()
