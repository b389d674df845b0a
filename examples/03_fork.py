"""One prompt, two endings.

What the reader learns: a fork shares its parent's whole pages and copies only the one that is partly filled; another
seed lets it go its own way; and a state that was kept is still there, to be stepped again to the very same bits,
whatever was done with its descendants.
"""

from __future__ import annotations

import purestep as ps
import torch

PROMPT = "And it came to pass in those days, that there went out a decree, "
PAGE_SIZE = 8
STEPS = 24


def pages_of(state: ps.DecodeState, request_id: int) -> list[int]:
    """Read which pages a request's tokens lie in."""
    request = next(r for r in state.requests if r.request_id == request_id)
    first = request.row * state.table.sizes.context
    slots = state.table.handle.rows("req_to_token", torch.arange(first, first + request.kv_len))
    return (slots[::PAGE_SIZE] // PAGE_SIZE).tolist()


def text_of(model: ps.Model, state: ps.DecodeState, request_id: int) -> str:
    """Decode what a request has sampled."""
    request = next(r for r in state.requests if r.request_id == request_id)
    return model.tokenizer.decode(request.outputs.tolist())


def main() -> None:
    """Fork a prompt, continue both ways, and go back."""
    model = ps.load_model("tiny")
    ids = [model.config.bos_token_id, *model.tokenizer.encode(PROMPT).ids]
    state = ps.init_state(model, ps.Capacity(requests=2, tokens=256, context=128), page_size=PAGE_SIZE)
    state, a = ps.open_request(state, ps.SamplingParams(temperature=0.8, seed=1, ignore_eos=True))
    state, _ = ps.extend_step(model, state, {a: ids})

    forked, b = ps.fork_request(state, a, sampling=ps.SamplingParams(temperature=0.8, seed=2, ignore_eos=True))
    own, other = pages_of(forked, a), pages_of(forked, b)
    shared = [page for page in own if page in other]
    print(f"{len(ids)} tokens in pages {own}; the fork has {other}: {len(shared)} shared, {len(other) - len(shared)} copied")

    both = forked
    for _ in range(STEPS):
        both, _ = ps.decode_step(model, both)
    print("seed 1:", text_of(model, both, a))
    print("seed 2:", text_of(model, both, b))

    # Back to the state before the fork, which knows nothing of it, and to the one with both.
    alone = state
    for _ in range(STEPS):
        alone, _ = ps.decode_step(model, alone)
    again = forked
    for _ in range(STEPS):
        again, out = ps.decode_step(model, again)
    last, _ = ps.decode_step(model, both)
    again, out = ps.decode_step(model, again)

    assert len(shared) == len(ids) // PAGE_SIZE
    assert [r.request_id for r in state.requests] == [a]
    assert len(state.requests[0].outputs) == 1
    assert text_of(model, both, a) != text_of(model, both, b)
    print("checked")


if __name__ == "__main__":
    main()
