"""One prompt, two continuations.

What the reader learns: a fork names its parent's whole pages too and copies only the one that is partly filled; another
seed lets it go its own way; and a state that was kept can be stepped again, to the same bits, whatever was done since
with the states that came from it.
"""

from __future__ import annotations

import purestep as ps
import torch
from torch import Tensor

PROMPT = "And it came to pass in those days, that there went out a decree"
PAGE_SIZE = 8
STEPS = 12


def params(seed: int) -> ps.SamplingParams:
    """Sample with this seed, without end."""
    return ps.SamplingParams(temperature=0.8, seed=seed, ignore_eos=True)


def run(model: ps.Model, state: ps.DecodeState, n_steps: int) -> tuple[ps.DecodeState, Tensor]:
    """Decode n steps: the last state, and the logits of every step."""
    logits = []
    for _ in range(n_steps):
        state, out = ps.decode_step(model, state)
        logits.append(out.logits)
    return state, torch.stack(logits)


def pages_of(state: ps.DecodeState, request_id: int) -> list[int]:
    """Look up in which pages the tokens of a request lie."""
    request = next(r for r in state.requests if r.request_id == request_id)
    first = request.row * state.table.sizes.context
    slots = state.table.handle.rows("req_to_token", torch.arange(first, first + request.kv_len))
    return (slots[::PAGE_SIZE] // PAGE_SIZE).tolist()


def text_of(model: ps.Model, state: ps.DecodeState, request_id: int) -> str:
    """Decode what a request has sampled, on one line."""
    request = next(r for r in state.requests if r.request_id == request_id)
    return " ".join(model.tokenizer.decode(request.outputs.tolist()).split())


def main() -> None:
    """Fork, continue both ways, and go back to every state that was kept."""
    model = ps.load_model("tiny")
    ids = [model.config.bos_token_id, *model.tokenizer.encode(PROMPT).ids]
    state = ps.init_state(model, ps.Capacity(requests=2, tokens=256, context=128), page_size=PAGE_SIZE)
    state, a = ps.open_request(state, params(seed=1))
    parent, _ = ps.extend_step(model, state, {a: ids})
    _, before = run(model, parent, STEPS)

    forked, b = ps.fork_request(parent, a, sampling=params(seed=2))
    own, other = pages_of(forked, a), pages_of(forked, b)
    shared = [page for page in own if page in other]
    print(f"parent: {len(ids)} tokens in pages {own}")
    print(f"fork:   {len(shared)} of them shared, then {other[len(shared) :]}")

    both, logits = run(model, forked, STEPS)
    print(f"seed 1: {PROMPT} ... {text_of(model, both, a)}")
    print(f"seed 2: {PROMPT} ... {text_of(model, both, b)}")

    _, logits_again = run(model, forked, STEPS)
    _, after = run(model, parent, STEPS)
    assert len(shared) == len(ids) // PAGE_SIZE
    assert text_of(model, both, a) != text_of(model, both, b)
    assert len(parent.requests) == 1
    assert len(both.requests[0].tokens) == len(ids) + 1 + STEPS
    assert torch.equal(logits, logits_again)
    assert torch.equal(before, after)
    print(f"{STEPS} steps of the parent and of the fork, taken again afterwards, gave the same logits bit for bit.")


if __name__ == "__main__":
    main()
