"""A slice of a release at its full width: memory and speed with weights as they are stored, and beside transformers.

purestep make-tiny SLICE --like flash --layers 0,2,3                                  # 13 GB: one layer of each kind
python tests/bench/bench_slice.py SLICE                                               # ours on stored weights
purestep make-tiny SMALL --source SLICE --experts 16 --vocab 9216
python tests/bench/bench_slice.py SMALL --beside                                      # ours, ours expanded, the peer

Bytes of a step are those of all weights but the embedding and the experts that no row chose; what they are compared
with is the speed of a sum over a large buffer in the same process.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import purestep as ps
import torch
from purestep.model.leaves import leaves_from_params
from transformers import DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM
from transformers.utils.quantization_config import FineGrainedFP8Config

GIB = 1 << 30


def read_speed() -> float:
    """Measure how fast a sum reads a buffer that no cache holds, in bytes a second."""
    buffer = torch.ones(GIB // 4)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        buffer.sum()
        times.append(time.perf_counter() - began)
    return GIB / min(times)


def step_bytes(model: ps.Model, batch: int) -> float:
    """Count the bytes of weights that a step reads, if rows choose experts independently."""
    config = model.config
    share = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** batch
    total = 0.0
    for path, leaf in leaves_from_params(model.params).items():
        if path != "embed" and not path.endswith("tid2eid"):
            total += leaf.nbytes * (share if ".ffn.w" in path else 1)
    return total


def prompt(batch: int, context: int, vocab: int) -> list[list[int]]:
    """Draw the tokens that come before."""
    return torch.randint(vocab, (batch, context), generator=torch.Generator().manual_seed(0)).tolist()


def our_step(model: ps.Model, batch: int, context: int) -> Callable[[], object]:
    """Decode greedily behind a prompt."""
    room = batch * (context + 256)
    state = ps.init_state(model, ps.Capacity(requests=batch, tokens=room, context=context + 256))
    chunks = {}
    for ids in prompt(batch, context, model.config.vocab_size):
        params = ps.SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=250)
        state, request = ps.open_request(state, params)
        chunks[request] = ids
    held = [ps.extend_step(model, state, chunks)[0]]

    def step() -> object:
        held[0], out = ps.decode_step(model, held[0])
        return out

    return step


def peer_step(folder: Path, dtype: torch.dtype, batch: int, context: int) -> Callable[[], object]:
    """Decode with transformers on the same weights, expanded."""
    model = DeepseekV4ForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        quantization_config=FineGrainedFP8Config(dequantize=True),
        attn_implementation="eager",
    )
    cache = DynamicCache(config=model.config)
    held = [torch.tensor(prompt(batch, context, model.config.vocab_size))]

    def step() -> object:
        with torch.inference_mode():
            out = model(input_ids=held[0], cache=cache, use_cache=True, logits_to_keep=1)
            held[0] = out.logits[:, -1:].argmax(-1)
        return out

    step()
    return step


def main() -> None:
    """Load, decode, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--beside", action="store_true", help="alternate with ours expanded and with transformers")
    parser.add_argument("--dtype", choices=list(harness.DTYPES), default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    speed, began = read_speed(), time.perf_counter()
    model = ps.load_model(options.folder, dtype=options.dtype, stored=True)
    loaded = time.perf_counter() - began
    size = sum(leaf.nbytes for leaf in leaves_from_params(model.params).values())
    wide = ps.load_model(options.folder, dtype=options.dtype) if options.beside else None
    rows = []
    for batch in options.batch:
        runs = {"stored": our_step(model, batch, options.context)}
        if wide is not None:
            runs["expanded"] = our_step(wide, batch, options.context)
            runs["peer"] = peer_step(options.folder, harness.DTYPES[options.dtype], batch, options.context)
        times = {name: harness.median_ms(found) for name, found in harness.alternate(runs, options.rounds).items()}
        read = step_bytes(model, batch) / times["stored"] * 1e-6
        row: dict[str, Any] = {"bench": "slice", "dtype": options.dtype, "batch": batch, "context": options.context}
        row |= {f"{name}_ms": found for name, found in times.items()}
        rows.append(row | {"read_gb_s": read, "of_memory_speed": read * 1e9 / speed})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    about = f"weights {size / GIB:.2f} GiB, loaded in {loaded:.0f} s, peak {peak:.2f} GiB"
    about += f", memory {speed / 1e9:.0f} GB/s"
    harness.report(f"decode, {options.threads} threads, medians of {options.rounds} steps; {about}", rows)


if __name__ == "__main__":
    main()
