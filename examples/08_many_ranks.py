"""The same steps over many ranks: every process runs this script, and each gets every token.

    python examples/08_many_ranks.py                                 # one process
    torchrun --nproc-per-node 2 examples/08_many_ranks.py            # two ranks that share the heads and the experts
    torchrun --nproc-per-node 4 examples/08_many_ranks.py --dp 2     # two replicas with requests of their own

Ranks of a replica hold the same state and make the same calls. Replicas run different requests; one that has nothing to
run still takes part in every step, because the experts lie on all ranks.
"""

from __future__ import annotations

import argparse
import os

import purestep as ps
import torch

PROMPTS = ["And God said", "In the beginning", "The LORD is", "And it came to pass"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, default=1, help="replicas of the attention")
    parser.add_argument("--tokens", type=int, default=12)
    options = parser.parse_args()
    n_ranks = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets it
    if n_ranks > 1:
        torch.distributed.init_process_group("gloo")
    # The layout is a value. Every rank reads its own part of the weights from the files.
    layout = ps.Parallel(tp=n_ranks // options.dp, dp=options.dp, timeout_s=60)
    model = ps.load_model("tiny", parallel=layout)
    ranks = model.ranks

    # The state belongs to the replica: the first one gets one request more than the others.
    prompts = PROMPTS[ranks.replica :: layout.dp]
    state = ps.init_state(model, ps.Capacity(requests=len(PROMPTS), tokens=2048, context=256))
    chunks = {}
    for prompt in prompts:
        state, request = ps.open_request(state, ps.SamplingParams(temperature=0, max_new_tokens=options.tokens))
        chunks[request] = [0, *model.tokenizer.encode(prompt).ids]

    state, _ = ps.extend_step(model, state, chunks)
    for _ in range(options.tokens):  # as many steps on every rank, whoever has finished
        state, _ = ps.decode_step(model, state)

    if ranks.attn.rank == 0:
        for request in chunks:
            text = model.tokenizer.decode(ps.find_request(state, request).tokens.tolist())
            print(f"replica {ranks.replica}: {text}", flush=True)
    held = sum(leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(model.params) if leaf is not None)
    print(f"rank {ranks.world.rank} of {ranks.world.size} holds {held:,} bytes of weights", flush=True)
    if n_ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
