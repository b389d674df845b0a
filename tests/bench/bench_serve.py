"""Throughput of ``purestep serve`` beside transformers' own ``transformers serve``, on the same checkpoint.

PYTHONPATH=tests python tests/bench/bench_serve.py --clients 1 8 32 --rounds 3

Both servers run at once, on the same folder, in the same dtype, with as many threads; one at a time is loaded, in
turns. The folder is the embedded checkpoint as transformers writes it, with two additions that make both sides do the
same work: the tokenizer puts the token that begins a text first, and no token ends a reply before its length. Replies
are greedy; what both sides counted is compared, and how many replies are the same text is reported.

The peer needs ``pip install fastapi uvicorn accelerate`` and runs in its default mode, one generation after the other.
Its other modes refuse this model (transformers 5.24): ``--continuous-batching`` and ``--compile`` have no caches for
layers of the kind "compressed_sparse_attention". ``--peer-arguments`` passes them on, to try again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import purestep as ps
import torch
from kit.checkpoints import peer_model
from purestep.serving.load_client import Target, run_load
from purestep.serving.load_plan import Prompt, draw_prompts
from purestep.serving.load_run import own_server
from purestep.serving.load_stats import Outcome, summarise
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

NEEDED = ("fastapi", "uvicorn", "accelerate", "openai")
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


def write_peer_folder(folder: Path) -> None:
    """Write the embedded checkpoint in a form that both sides read."""
    embedded = Path(ps.__file__).parent / "model" / "tiny"
    config = {"attention_dropout": 0.0} | json.loads((embedded / "config.json").read_text())
    tensors = load_file(embedded / "model.safetensors")
    peer_model(config, tensors, torch.bfloat16).save_pretrained(folder)
    tokenizer = ps.load_model("tiny").tokenizer
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS).save_pretrained(folder)
    found = {"bos_token_id": tokenizer.token_to_id(BOS), "do_sample": False, "use_cache": True}
    (folder / "generation_config.json").write_text(json.dumps(found))


@contextlib.contextmanager
def peer_server(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Run transformers' server while a block runs; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*("transformers", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu")]
    command += ["--dtype", options.dtype, *shlex.split(options.peer_arguments)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with (
        open(folder / "peer.log", "w") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            while process.poll() is None:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1):
                    break
                time.sleep(0.2)
            if process.returncode is not None:
                raise SystemExit(f"transformers serve ended before it served: {(folder / 'peer.log').read_text()}")
            yield url
        finally:
            process.terminate()


def load(target: Target, prompts: Sequence[Prompt], clients: int) -> list[Outcome]:
    """Load one server; everything must succeed at full length."""
    found = asyncio.run(run_load(target, prompts, concurrency=clients))
    for outcome, prompt in zip(found, prompts, strict=True):
        if outcome.failure is not None:
            raise SystemExit(f"{target.base_url}: {outcome.failure}: {outcome.detail}")
        if outcome.output_tokens != prompt.max_tokens:
            raise SystemExit(f"{target.base_url}: {outcome.output_tokens} of {prompt.max_tokens} tokens")
    return found


def compare(ours: Target, peer: Target, clients: int, options: argparse.Namespace) -> dict[str, Any]:
    """Load both servers in turns with the same prompts, new ones every round."""
    figures: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    n_same = n_all = 0
    for turn in range(options.rounds):
        prompts = draw_prompts(
            ps.load_model("tiny").tokenizer,
            max(clients, options.least),
            input_len=options.input_len,
            output_len=options.output_len,
            shared_prefix_len=0,
            seed=1000 * clients + turn,
        )
        sides = {"ours": ours, "peer": peer}
        found = {name: load(sides[name], prompts, clients) for name in (sorted(sides) if turn % 2 else sides)}
        for one, other in zip(found["ours"], found["peer"], strict=True):
            if one.input_tokens != other.input_tokens:
                raise SystemExit(f"prompts differ: {one.input_tokens} and {other.input_tokens} tokens")
            n_same, n_all = n_same + (one.text == other.text), n_all + 1
        for name, outcomes in found.items():
            figures[name].append(summarise(outcomes))

    def middle(name: str, figure: str) -> float:
        return statistics.median(one[figure] for one in figures[name])

    ratios = [
        one["output_tokens_per_s"] / other["output_tokens_per_s"]
        for one, other in zip(figures["ours"], figures["peer"], strict=True)
    ]
    return {
        "bench": "serve",
        "clients": clients,
        "requests": n_all,
        "ours_tokens_per_s": middle("ours", "output_tokens_per_s"),
        "peer_tokens_per_s": middle("peer", "output_tokens_per_s"),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ours_p50_ttft_ms": middle("ours", "p50_ttft_ms"),
        "peer_p50_ttft_ms": middle("peer", "p50_ttft_ms"),
        "ours_p50_itl_ms": middle("ours", "p50_itl_ms"),
        "peer_p50_itl_ms": middle("peer", "p50_itl_ms"),
        "same_text": n_same / n_all,
    }


async def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start both servers and compare them at every number of clients."""
    most = str(max(options.clients))
    serve = [sys.executable, "-m", "purestep", "serve", "--port", "0", "--model", str(folder), "--no-log-requests"]
    serve += ["--dtype", options.dtype, "--max-running-requests", most, "--max-queued-requests", most]
    serve += ["--context-length", str(options.input_len + options.output_len + 16), "--max-reused-prefixes", "0"]
    rows = []
    with peer_server(folder, options) as peer_url:
        async with own_server(serve) as our_url:
            ours, peer = (Target(base_url=url, model=str(folder)) for url in (our_url, peer_url))
            warm = [Prompt("In the beginning", options.output_len)] * 2
            for clients in options.clients:
                for side in (ours, peer):
                    await asyncio.to_thread(load, side, warm, 1)
                rows.append(await asyncio.to_thread(compare, ours, peer, clients, options))
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--least", type=int, default=4, help="requests of a round at least")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    parser.add_argument("--peer-arguments", default="")
    options = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"transformers serve needs {', '.join(missing)}; pip install {' '.join(missing)}")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        write_peer_folder(Path(scratch))
        rows = asyncio.run(measure(Path(scratch), options))
    title = f"purestep serve beside transformers serve, {options.dtype}, {options.threads} threads each, "
    harness.report(title + f"{options.input_len} + {options.output_len} tokens, medians of {options.rounds}", rows)


if __name__ == "__main__":
    main()
