"""One decode step taken apart.

What the reader learns: what each part of a step reads and returns, on three requests with histories of 10, 7 and 20
tokens and pages of 4. Look at the slots: 14 and 23 lie behind the tokens before them, 44 opens a new page. The length
becomes 11 while the token sits at position 10. In the end the parts are compared with ``decode_step``, which is nothing
but their composition, on the same state: it was kept, so it can be stepped again.
"""

from __future__ import annotations

import attrs
import purestep as ps
import torch
from purestep.model.forward import embed_tokens
from purestep.model.layer import head_logits

HISTORIES = {"A": 10, "B": 7, "C": 20}
PAGE_SIZE = 4
TEXT = "In the beginning God created the heaven and the earth. And the earth was without form, and void."


def prefilled(model: ps.Model) -> ps.DecodeState:
    """Open the three requests and feed them their histories; afterwards each has a sampled token that waits."""
    ids = model.tokenizer.encode(TEXT).ids
    state = ps.init_state(model, ps.Capacity(requests=3, tokens=128, context=32), page_size=PAGE_SIZE)
    prompts = {}
    for n_tokens in HISTORIES.values():
        state, request_id = ps.open_request(state, ps.SamplingParams(temperature=0.8, seed=n_tokens, ignore_eos=True))
        prompts[request_id] = ids[:n_tokens]
    state, _ = ps.extend_step(model, state, prompts)
    return state


def main() -> None:
    """Take a step apart, print what every part returns, and put it together again."""
    model = ps.load_model("tiny")
    before = prefilled(model)

    state, batch = ps.prepare_decode(before)
    slots = batch.out_cache_loc.tolist()
    print("prepare   slots of the new tokens  ", dict(zip(HISTORIES, slots, strict=True)))
    print("          lengths before and after ", batch.prefix_lens.tolist(), "->", batch.seq_lens.tolist())

    view = ps.forward_batch(state, batch)
    positions = view.positions.tolist()
    print("view      input ids, from the relay", view.input_ids.tolist())
    print("          positions                ", positions)

    mhc, kv = embed_tokens(model, view), state.kv
    print("embed     residual streams [T,M,H] ", tuple(mhc.streams.shape))
    for i, ratio in enumerate(model.config.compress_ratios):
        mhc, kv = ps.layer_step(model, i, mhc, kv, view)
        print(f"layer {i}   {f'window and 1/{ratio}' if ratio else 'window only':24}", tuple(mhc.streams.shape))

    with torch.no_grad():
        logits = head_logits(model, mhc.streams)
    print("head      logits [B,V]             ", tuple(logits.shape))

    state = attrs.evolve(state, kv=kv)
    stops = model.config.eos_token_id
    sampling, next_ids = ps.sample(logits, state.sampling, batch.request_ids, view.positions, stop_token_ids=stops)
    print("sample    one id a row             ", next_ids.tolist())
    state = ps.relay(attrs.evolve(state, sampling=sampling), batch, next_ids)
    state, finished = ps.commit(state, next_ids)
    print("commit    tokens a request         ", [len(r.tokens) for r in state.requests], "finished", dict(finished))

    assert slots == [14, 23, 44]
    assert positions == list(HISTORIES.values())
    after, out = ps.decode_step(model, before)
    assert torch.equal(out.logits, logits)
    assert list(out.next_token_ids) == next_ids.tolist()
    assert [r.tokens for r in after.requests] == [r.tokens for r in state.requests]
    print("The parts, put together, gave decode_step's logits and tokens, bit for bit.")


if __name__ == "__main__":
    main()
