"""What the ranks of tests of loading, saved states, wrong decisions and agreement run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import purestep as ps
import torch
from kit.rank_collectives import joined
from kit.rank_steps import Feed, Step, part_of
from kit.steps import ENDLESS, fresh
from purestep.model import part_reading, shards
from purestep.model.fingerprint import fingerprint
from purestep.model.leaves import leaves_from_params
from purestep.step.announce import agreement
from torch import Tensor

__all__ = [
    "Loaded",
    "agree",
    "cache_rows",
    "constrained",
    "continue_saved",
    "decide",
    "decode_many",
    "export_after",
    "fork_and_go",
    "import_and_go",
    "load_ascend",
    "load_counted",
    "prints",
    "refuse_to_move",
    "saved_after",
]

RATIOS = (0, 4, 128)


@attrs.frozen(eq=False)
class Loaded:
    """What a rank has read, and what it holds."""

    read: int
    held: int
    fingerprint: str
    logits: Tensor


class _Counted:
    """An open file that counts the bytes that are taken out of it."""

    def __init__(self, handle: Any, taken: list[int]) -> None:
        self._handle, self._taken = handle, taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def get_tensor(self, name: str) -> Tensor:
        return self._count(self._handle.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        part, count = self._handle.get_slice(name), self._count

        class Slice:
            get_dtype, get_shape = part.get_dtype, part.get_shape

            def __getitem__(self, index: Any) -> Tensor:
                return count(part[index])

        return Slice()

    def _count(self, tensor: Tensor) -> Tensor:
        self._taken.append(tensor.nbytes)
        return tensor


def load_counted(parallel: ps.Parallel, folder: str, ids: Sequence[int]) -> Loaded:
    """Load a rank's part of a checkpoint, count the bytes, and run a prompt."""
    taken: list[int] = []
    opened = shards.safe_open

    class Counting(_Counted):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(opened(*args, **options), taken)

        def __enter__(self) -> Counting:
            self._handle.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._handle.__exit__(*error)

    readers = (shards, part_reading)
    try:
        for module in readers:
            module.safe_open = Counting  # type: ignore[assignment, misc]
        model = ps.load_model(folder, parallel=parallel)
    finally:
        for module in readers:
            module.safe_open = opened  # type: ignore[misc]
    state, request = ps.open_request(fresh(model, 1), ENDLESS)
    _, out = ps.extend_step(model, state, {request: list(ids)})
    held = sum(leaf.nbytes for leaf in leaves_from_params(model.params).values())
    return Loaded(sum(taken), held, fingerprint(model), out.logits)


def load_ascend(parallel: ps.Parallel, folder: str) -> None:
    """Load a part of a model onto Ascend kernels."""
    ps.load_model(folder, parallel=parallel, kernels="ascend", chip="a3", dtype="bfloat16")


def prints(parallel: ps.Parallel) -> str:
    """Return the fingerprint of the whole model as a rank knows it."""
    return fingerprint(part_of(parallel, RATIOS, 0))


def _stepped(parallel: ps.Parallel, ids: Sequence[int], steps: int) -> tuple[ps.Model, ps.DecodeState, int]:
    model = part_of(parallel, RATIOS, 0)
    state, request = ps.open_request(fresh(model, 2), ps.SamplingParams(temperature=0.8, seed=3, ignore_eos=True))
    state, _ = ps.extend_step(model, state, {request: list(ids)})
    for _ in range(steps):
        state, _ = ps.decode_step(model, state)
    return model, state, request


def export_after(parallel: ps.Parallel, ids: Sequence[int], steps: int, folder: str) -> list[int]:
    """Run a request, write it to a folder of this rank's, and return the tokens that it goes on with."""
    model, state, request = _stepped(parallel, ids, steps)
    ps.save_request(ps.export_request(state, request), f"{folder}/{model.ranks.world.rank}")
    return _go_on(model, state, steps)


def import_and_go(parallel: ps.Parallel, folder: str, steps: int) -> list[int]:
    """Take the request that rank 0 has written into an empty state, and go on."""
    model = part_of(parallel, RATIOS, 0)
    state, _ = ps.import_request(fresh(model, 1, page_size=16), ps.load_request(f"{folder}/0"))
    return _go_on(model, state, steps)


def saved_after(parallel: ps.Parallel, ids: Sequence[int], steps: int, folder: str) -> list[int]:
    """Run a request, write the whole state, and return the tokens that it goes on with."""
    model, state, _ = _stepped(parallel, ids, steps)
    ps.save_state(state, Path(folder) / str(model.ranks.world.rank))
    return _go_on(model, state, steps)


def continue_saved(parallel: ps.Parallel, folder: str, steps: int) -> list[int]:
    """Restore the state that rank 0 has written, and go on."""
    model = part_of(parallel, RATIOS, 0)
    return _go_on(model, ps.restore_state(model, f"{folder}/0"), steps)


def _go_on(model: ps.Model, state: ps.DecodeState, steps: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(steps):
        state, out = ps.decode_step(model, state)
        tokens += out.next_token_ids
    return tokens


def decide(parallel: ps.Parallel, step: Step, wrong: str) -> tuple[str, str, float, bool]:
    """Prefill, then step as ``wrong`` says; return what it came to, its words, the seconds, and whether the state is
    what it was."""
    model = part_of(parallel, RATIOS, 0)
    entry = step[model.ranks.replica]
    state, request = ps.open_request(fresh(model, 1), ENDLESS)
    if entry:
        assert isinstance(entry, Feed)
        state, _ = ps.extend_step(model, state, dict(entry.tokens))
    else:
        state, _ = ps.extend_step(model, state, {})
    before = ps.find_request(state, request).tokens.tolist()
    start = time.monotonic()
    try:
        _step_wrongly(model, state, request, wrong)
        found = ("fine", "")
    except ps.PurestepError as error:
        found = (type(error).__name__, str(error))
    seconds = time.monotonic() - start
    same = ps.find_request(state, request).tokens.tolist() == before and state.launched is None
    return *found, seconds, same


def _step_wrongly(model: ps.Model, state: ps.DecodeState, request: int, wrong: str) -> None:
    if wrong == "other token":
        ps.decode_step(model, state, force={request: 7})
    elif wrong == "other mask":
        ps.decode_step(model, state, mask={request: torch.full((2,), -1, dtype=torch.int32)})
    elif wrong == "idle":
        ps.decode_step(model, state, only=[])
    elif wrong == "unknown request":
        ps.decode_step(model, state, only=[99])
    elif wrong == "other kernels":
        ps.decode_step(attrs.evolve(model, ops=attrs.evolve(model.ops, name="another")), state)
    elif wrong == "other numerics":
        ps.decode_step(attrs.evolve(model, numerics=ps.Numerics.official()), state)
    elif wrong == "many tokens":
        ps.extend_step(model, state, {request: [3, 4, 5]})
    elif wrong == "no logits":
        ps.extend_step(model, state, {request: [3]}, sample=False)
    else:
        ps.decode_step(model, state)


def decode_many(parallel: ps.Parallel, n: int) -> str:
    """Prefill n requests and decode them; return what it came to."""
    model = part_of(parallel, RATIOS, 0)
    state = fresh(model, 3)
    for _ in range(n):
        state, _ = ps.open_request(state, ENDLESS)
    state, _ = ps.extend_step(model, state, {request: [3, 4 + request] for request in range(n)})
    try:
        ps.decode_step(model, state)
    except ps.PurestepError as error:
        return type(error).__name__
    return "fine"


def agree(parallel: ps.Parallel, ids: Tensor, is_constrained: bool) -> Tensor:
    """Let the ranks of a replica agree on tokens; the ids themselves where nothing is exchanged."""
    rule = agreement(joined(parallel), is_constrained=is_constrained)
    return ids if rule is None else rule(ids)


def constrained(parallel: ps.Parallel, ids: Sequence[int], allowed: int) -> tuple[int, ...]:
    """Sample two tokens of which only one is allowed."""
    model = part_of(parallel, RATIOS, 0)
    state, request = ps.open_request(fresh(model, 1), ENDLESS)
    bits = torch.zeros(2, dtype=torch.int32)
    bits[allowed // 32] = 1 << allowed % 32
    state, first = ps.extend_step(model, state, {request: list(ids)}, mask={request: bits})
    _, second = ps.decode_step(model, state, mask={request: bits})
    return first.next_token_ids + second.next_token_ids


def _paged(parallel: ps.Parallel) -> tuple[ps.Model, ps.DecodeState]:
    model = part_of(parallel, RATIOS, 0)
    return model, fresh(model, 3, page_size=16)


def fork_and_go(parallel: ps.Parallel, ids: Sequence[int], at: int) -> list[list[int]]:
    """Fork a request at a token, go on with both, and return all tokens; the states stay sound."""
    model, state = _paged(parallel)
    state, parent = ps.open_request(state, ENDLESS)
    state, _ = ps.extend_step(model, state, {parent: list(ids)})
    state, child = ps.fork_request(state, parent)
    state, cut = ps.fork_request(state, parent, at=at)
    for _ in range(5):
        state, _ = ps.decode_step(model, state, only=[parent, child, cut])
    assert ps.invariants.check(state) == ()
    return [ps.find_request(state, one).tokens.tolist() for one in (parent, child, cut)]


def cache_rows(parallel: ps.Parallel) -> dict[str, int]:
    """Count the rows of this rank's cache buffers."""
    _, state = _paged(parallel)
    return {name: state.kv.handle.spec(name)[0][0] for name in state.kv.handle.names}


def refuse_to_move(parallel: ps.Parallel) -> list[str]:
    """Try to export, save and restore; return what each came to."""
    model, state = _paged(parallel)
    state, request = ps.open_request(state, ENDLESS)
    found = []
    for move in (
        lambda: ps.export_request(state, request),
        lambda: ps.save_state(state, "nowhere"),
        lambda: ps.restore_state(model, "nowhere"),
    ):
        try:
            move()
        except ps.PurestepError as error:
            found.append(type(error).__name__)
    return found
