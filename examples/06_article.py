"""One token's trip, question by question, as ``trace_step`` answers them.

What the reader learns: how to follow one sampled token through a step: it becomes the input, gets a slot before
anything is in it, is written, reads its history, meets other requests' tokens at the experts and is back in its row
when the whole vocabulary is scored. Histories are 10, 7 and 20 tokens, pages hold 4.
"""

from __future__ import annotations

from collections.abc import Iterable

import purestep as ps
from purestep.step.trace_values import Access, TraceStage

TEXT = "In the beginning God created the heaven and the earth. And the earth was without form, and void."
HISTORIES = (10, 7, 20)


def prefilled(model: ps.Model) -> ps.DecodeState:
    """Open requests 0, 1 and 2 and feed them their histories."""
    state = ps.init_state(model, ps.Capacity(requests=3, tokens=128, context=32), page_size=4)
    ids, prompts = model.tokenizer.encode(TEXT).ids, {}
    for n_tokens in HISTORIES:
        state, request_id = ps.open_request(state, ps.SamplingParams(temperature=0.8, seed=n_tokens, ignore_eos=True))
        prompts[request_id] = ids[:n_tokens]
    return ps.extend_step(model, state, prompts)[0]


def slots(accesses: Iterable[Access], store: str) -> dict[int, tuple[int, ...]]:
    """Collect the slots of one store by request."""
    return {one.request_id: one.slots for one in accesses if one.store == store}


def main() -> None:
    """Trace two steps and check every answer."""
    model = ps.load_model("tiny")
    state, _, trace = ps.trace_step(model, prefilled(model))
    _, _, following = ps.trace_step(model, state)
    stages: dict[str, TraceStage] = {stage.name: stage for stage in trace.stages}
    axes, rows = trace.axes, trace.running

    print("1. How does the last sample become an input, and where will it be written?")
    prepare = stages["prepare"]
    for row in rows:
        (token,), (position,), (rule,), (slot,) = row.input_ids, row.positions, row.slot_rules, row.out_full_loc
        print(f"   token {token:4} at position {position:2}: {rule} = {slot}")
    assert [row.len_before for row in rows] == list(HISTORIES)
    assert [(row.positions[0], row.len_after) for row in rows] == [(n, n + 1) for n in HISTORIES]
    assert [row.out_full_loc[0] for row in rows] == [14, 23, 44]
    assert slots(prepare.writes, "req_to_token") == {0: (10,), 1: (7,), 2: (20,)}
    assert not slots(prepare.writes, "swa"), "a slot is named before anything is in it"

    print("2. What does the model see of three requests?")
    view = stages["forward_batch"]
    print(f"   {view.n_tokens} tokens, of requests {view.request_ids}, at positions {view.positions}")
    assert slots(view.reads, "relay") == {row.request_id: (row.row,) for row in rows}

    print("3. Which shapes does it take?")
    print("  ", " -> ".join(f"{shape.token} {shape.sizes}" for shape in stages["embed"].shapes))
    assert stages["embed"].shapes[-1].sizes == (3, axes["M"], axes["H"])
    assert stages["1.attn.mix"].shapes[-1].sizes == stages["1.ffn.mix"].shapes[-1].sizes == (3, axes["H"])

    print("4. What is written, and which history is read?")
    compress, read = stages["1.attn.compress"], stages["1.attn.read"]
    print("   window entries written", slots(stages["1.attn.window"].writes, "swa"))
    print(
        "   entries of 4 written  ", slots(compress.writes, "c4"), "from state rows", slots(compress.reads, "c4_state")
    )
    print("   entries of 4 read     ", slots(read.reads, "c4"))
    assert slots(compress.writes, "c4") == {1: (5,)}, "only the token at position 7 ends a group of 4"
    assert [len(slots(read.reads, "swa")[i]) for i in range(3)] == [11, 8, 21]
    assert [len(slots(read.reads, "c4")[i]) for i in range(3)] == [2, 2, 5]

    print("5. When does a row change hands?")
    for expert in stages["1.ffn.dispatch"].experts:
        print(f"   expert {expert.expert_id} computes rows {expert.rows}")
    moved = {stage.name.split(".", 1)[-1] for stage in trace.stages if "->" in stage.ownership}
    assert moved == {"ffn.dispatch", "ffn.combine"}
    assert sum(len(expert.rows) for expert in stages["1.ffn.dispatch"].experts) == 3 * axes["K"]

    print("6. When is the whole vocabulary there, and what becomes of the sample?")
    print("  ", " -> ".join(f"{shape.token} {shape.sizes}" for shape in stages["head"].shapes))
    print(
        "   sampled",
        [row.sampled for row in rows],
        "- the next step is fed",
        [r.input_ids[0] for r in following.running],
    )
    assert stages["head"].shapes[-1].sizes == (3, axes["V"])
    assert [row.sampled for row in rows] == [row.input_ids[0] for row in following.running]

    print(f"{len(trace.stages)} stages answered; every number above is checked.")


if __name__ == "__main__":
    main()
