"""Train the tiny DeepSeek-V4 checkpoint that comes with purestep.

What the reader learns: the model is a function of its parameters, so training is ``torch.func.grad_and_value`` of a
loss over a pytree, and an optimiser is a function (state, gradients, parameters) -> (state, parameters). Matrices learn
by Muon and the rest by AdamW, experts are balanced without an extra loss, and sequences get longer as training goes on,
all as V4 was trained.

    python examples/05_train.py --steps 5                      # a look, under twenty seconds, writes nothing
    python examples/05_train.py --minutes 28 --out first       # then: purestep.load_model("first")
    python examples/05_train.py --minutes 8 --seed 1 --start first --out tiny

The embedded checkpoint came from the last two lines; its loss is drawn in ``examples/data/loss.png``.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import torch
from matplotlib.figure import Figure
from purestep import (
    Capacity,
    Config,
    Model,
    Numerics,
    SamplingParams,
    extend_step,
    forward_sequence,
    init_state,
    open_request,
)
from purestep.model.checkpoint import read_checkpoint, write_checkpoint
from purestep.model.initial import init_params
from purestep.model.params import LayerParams, Params
from purestep.ops.dispatch import REFERENCE
from purestep.ops.router import route_scored
from purestep.state.config import RopeScaling
from purestep.state.values import value
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from train_tokenizer import read_text, train_tokenizer
from training_kernels import TRAINING

CONFIG = Config(
    vocab_size=1536,
    hidden_size=192,
    num_hidden_layers=4,
    compress_ratios=(0, 4, 128, 4),
    num_attention_heads=4,
    head_dim=64,
    qk_rope_head_dim=16,
    q_lora_rank=96,
    o_groups=2,
    o_lora_rank=64,
    index_n_heads=16,
    index_head_dim=32,
    # The loss teaches the indexer nothing, so up to 1024 tokens it is not asked to choose.
    index_topk=256,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=96,
    num_hash_layers=1,
    rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=1024),
    max_position_embeddings=4096,
)

STEP_TOKENS = 2048
STAGES = ((0.0, (128,)), (0.45, (256,)), (0.8, (256, 1024)))
"""From which part of the training on which sequence lengths take turns: short ones cost less attention."""

DIALOGUE_SHARE = 1 / 8
LEARNING_RATE, WARMUP, CLIP, WEIGHT_DECAY = 6e-3, 0.03, 1.0, 0.1
MOMENTUM, BETAS, EPS = 0.95, (0.9, 0.98), 1e-10
BALANCE_EVERY, BALANCE_STEP = 10, 0.01
SAVE_SECONDS = 240
RESUMED_PART = 0.7
"""Where in the schedule a run from a finished checkpoint begins: small steps, long windows."""

QUICK_STEPS, QUICK_TEXT, QUICK_BYTES = 50, 200_000, 4000
"""A run shorter than this is for looking; it reads and measures only the beginnings of the texts."""


# Text -----------------------------------------------------------------------------------------------------------------


@attrs.frozen
class Stream:
    """Token ids in a row, and the places where something begins."""

    ids: np.ndarray
    starts: np.ndarray


def stream_of(tokenizer: Tokenizer, pieces: Sequence[str]) -> Stream:
    """Encode pieces one after the other, remembering where each begins."""
    encoded = [item.ids for item in tokenizer.encode_batch_fast(pieces)]
    starts = np.cumsum([0] + [len(ids) for ids in encoded[:-1]])
    return Stream(np.concatenate(encoded), starts)


def dialogue_of(chapter: str, turn: int) -> str:
    """Turn a chapter into a conversation: the user quotes a verse, the assistant goes on, every other time thinking."""
    verses = chapter.split("\n")
    talk = ""
    for k in range(0, len(verses) - 2, 3):
        quote, first, second = verses[k : k + 3]
        answer = f"<think>{first}</think>{second}" if (turn + k) % 2 else f"</think>{first}\n{second}"
        talk += f"<｜User｜>{quote}<｜Assistant｜>{answer}<｜end▁of▁sentence｜>"
    return talk


def read_streams(tokenizer: Tokenizer, text: str) -> tuple[Stream, Stream]:
    """Read the book twice: as running text, and as conversations that teach the control tokens and EOS."""
    chapters = text.strip("\n").split("\n\n")
    talks = [dialogue_of(chapter, turn) for turn, chapter in enumerate(chapters)]
    return (
        stream_of(tokenizer, [chapter + "\n\n" for chapter in chapters]),
        stream_of(tokenizer, [talk for talk in talks if talk]),
    )


def draw_batch(streams: tuple[Stream, Stream], rng: np.random.Generator, rows: int, length: int) -> Tensor:
    """Draw windows of ``length + 1`` tokens: half begin with BOS at a beginning, half anywhere; i64[rows,length+1]."""
    batch = []
    for _ in range(rows):
        stream = streams[int(rng.random() < DIALOGUE_SHARE)]
        last = len(stream.ids) - length - 1
        if rng.random() < 0.5:
            start = rng.choice(stream.starts[stream.starts <= last])
            batch.append(np.concatenate([[CONFIG.bos_token_id], stream.ids[start : start + length]]))
        else:
            start = rng.integers(last)
            batch.append(stream.ids[start : start + length + 1])
    return torch.from_numpy(np.stack(batch).astype(np.int64))


# Optimiser ------------------------------------------------------------------------------------------------------------


@value
@attrs.frozen(eq=False, kw_only=True)
class OptimizerState:
    """What the optimiser remembers: a step count, and two trees shaped like the parameters."""

    step: int
    first: dict[str, Tensor]
    second: dict[str, Tensor]


def init_optimizer(params: dict[str, Tensor]) -> OptimizerState:
    """Start from nothing."""
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    return OptimizerState(step=0, first=zeros, second={k: z for k, z in zeros.items() if not is_muon(k, z)})


def is_muon(name: str, p: Tensor) -> bool:
    """Tell the matrices that map activations to activations from embeddings, heads, biases and norms."""
    return p.ndim >= 2 and not name.endswith(("embed", "head", "ape"))


def orthogonalize(x: Tensor) -> Tensor:
    """Bring the singular values of (stacked) matrices near one.

    Five rounds of ``x <- a x + b (x x^T) x + c (x x^T)^2 x``. Source: Jordan et al., "Muon: An optimizer for hidden
    layers in neural networks" (2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + EPS)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def muon_direction(name: str, momentum: Tensor, grad: Tensor) -> Tensor:
    """Orthogonalise the (Nesterov) momentum, scaled to the size of an AdamW step.

    Source of the scale: Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982.
    """
    ahead = grad + MOMENTUM * momentum
    # Gate and up projections are two matrices that happen to be stored as one.
    parts = ahead.unflatten(-2, (2, -1)) if name.endswith("w13") else ahead
    return (orthogonalize(parts) * (0.2 * math.sqrt(max(parts.shape[-2:])))).reshape(ahead.shape)


def adamw_direction(m: Tensor, v: Tensor, step: int) -> Tensor:
    """Divide the mean gradient by its root mean square, both corrected for starting at zero."""
    return m / (1 - BETAS[0] ** step) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)


def optimizer_step(
    state: OptimizerState, grads: dict[str, Tensor], params: dict[str, Tensor], rate: float
) -> tuple[OptimizerState, dict[str, Tensor]]:
    """Take one step: Muon for matrices, AdamW for the rest, decay for matrices only."""
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    factor = (CLIP / (norm + EPS)).clamp(max=1.0)
    step, first, second, new = state.step + 1, {}, {}, {}
    for name, p in params.items():
        g = grads[name] * factor
        if is_muon(name, p):
            first[name] = MOMENTUM * state.first[name] + g
            direction = muon_direction(name, first[name], g)
        else:
            first[name] = torch.lerp(state.first[name], g, 1 - BETAS[0])
            second[name] = torch.lerp(state.second[name], g.square(), 1 - BETAS[1])
            direction = adamw_direction(first[name], second[name], step)
        decay = WEIGHT_DECAY if p.ndim >= 2 else 0.0
        new[name] = p - rate * (direction + decay * p)
    return OptimizerState(step=step, first=first, second=second), new


def learning_rate(part: float) -> float:
    """Warm up linearly, then follow a half cosine to zero; ``part`` of the training is done."""
    return LEARNING_RATE * min(1.0, part / WARMUP) * 0.5 * (1 + math.cos(math.pi * min(part, 1.0)))


# Model ----------------------------------------------------------------------------------------------------------------


def learnt_leaves(params: Params) -> dict[str, Tensor]:
    """Pick what learns by gradient, by name: all but integers (the hash table) and the balancing bias."""
    return {
        pytree.keystr(path): leaf
        for path, leaf in pytree.tree_flatten_with_path(params)[0]
        if leaf is not None and leaf.is_floating_point() and not pytree.keystr(path).endswith("ffn.bias")
    }


def with_leaves(params: Params, learnt: dict[str, Tensor]) -> Params:
    """Put what was picked back in its place."""
    return pytree.tree_map_with_path(lambda path, leaf: learnt.get(pytree.keystr(path), leaf), params)


def average(one: Params, other: Params) -> Params:
    """Take the mean of two runs that share a beginning: it predicts new text better than either end."""
    return pytree.tree_map(lambda a, b: (a + b) / 2 if a is not None and a.is_floating_point() else a, one, other)


def loss_of(learnt: dict[str, Tensor], model: Model, windows: Tensor) -> Tensor:
    """Compute the mean negative log-likelihood of every next token, in nats."""
    model = attrs.evolve(model, params=with_leaves(model.params, learnt))
    logits = forward_sequence(model, windows[:, :-1], ops=TRAINING)
    return F.cross_entropy(logits.flatten(0, -2), windows[:, 1:].flatten())


def expert_loads(model: Model, windows: Tensor) -> dict[int, Tensor]:
    """Prefill the windows through the engine with a router that counts: tokens per expert, by identity of the bias."""
    loads: dict[int, Tensor] = {}

    def counting(logits: Tensor, bias: Tensor, count: int, factor: float) -> tuple[Tensor, Tensor]:
        ids, weights = route_scored(logits, bias, count, factor)
        loads[id(bias)] = torch.bincount(ids.flatten(), minlength=len(bias))
        return ids, weights

    counted = attrs.evolve(model, ops=attrs.evolve(model.ops, route_scored=counting))
    rows, length = windows.shape
    state = init_state(counted, Capacity(requests=rows, tokens=2 * rows * length, context=2 * length))
    chunks = {}
    for window in windows.tolist():
        state, request = open_request(state, SamplingParams(temperature=0.0))
        chunks[request] = window
    extend_step(counted, state, chunks)
    return loads


def balance_experts(model: Model, windows: Tensor) -> Params:
    """Move every selection bias a little against the load: up for experts below the mean, down for those above."""
    loads = expert_loads(model, windows)

    def balanced(layer: LayerParams) -> LayerParams:
        if layer.ffn.bias is None:
            return layer
        load = loads[id(layer.ffn.bias)].float()
        bias = layer.ffn.bias + BALANCE_STEP * torch.sign(load.mean() - load)
        return attrs.evolve(layer, ffn=attrs.evolve(layer.ffn, bias=bias))

    return attrs.evolve(model.params, layers=tuple(balanced(layer) for layer in model.params.layers))


@torch.no_grad()
def bits_per_byte(model: Model, ids: Sequence[int], n_bytes: int, context: int = 1024, stride: int = 512) -> float:
    """Measure how many bits the model needs for every byte of a text it has never seen.

    Windows of ``context`` tokens advance by ``stride``; every token is counted once, in the first window that has it,
    so all but the first window's are predicted from at least ``context - stride`` tokens before them.
    """
    nats, seen = 0.0, 1
    while seen < len(ids):
        start = max(0, seen - 1 - (context - stride))
        window = torch.tensor(ids[start : start + context + 1])
        costs = F.cross_entropy(forward_sequence(model, window[:-1]), window[1:], reduction="none")
        nats += costs[seen - 1 - start :].double().sum().item()
        seen = start + len(window)
    return nats / math.log(2) / n_bytes


# Run ------------------------------------------------------------------------------------------------------------------


def batch_shape(part: float, step: int) -> tuple[int, int]:
    """Give (rows, length) of a step: always the same number of tokens, longer windows as training goes on."""
    lengths = [lengths for start, lengths in STAGES if part >= start][-1]
    length = lengths[step % len(lengths)]
    return STEP_TOKENS // length, length


def draw_curve(losses: Sequence[float], path: Path) -> None:
    """Draw the loss, smoothed over a fiftieth of the run, as a small picture."""
    width = max(1, len(losses) // 50)
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    axes.plot(np.arange(len(losses)) * STEP_TOKENS / 1e6, losses, color="0.85", linewidth=0.5)
    axes.plot((np.arange(len(smooth)) + width / 2) * STEP_TOKENS / 1e6, smooth)
    axes.set(xlabel="million tokens", ylabel="nats a token", ylim=(min(losses) - 0.2, None))
    figure.savefig(path, dpi=80)


def save(out: Path, params: Params, tokenizer: Tokenizer, losses: Sequence[float]) -> None:
    """Write a checkpoint that ``purestep.load_model`` takes, and the curve."""
    write_checkpoint(out, CONFIG, params, dtype=torch.bfloat16)
    tokenizer.save(str(out / "tokenizer.json"))
    draw_curve(losses, out / "loss.png")


def train(model: Model, tokenizer: Tokenizer, text: str, options: argparse.Namespace) -> tuple[Params, list[float]]:
    """Train until the steps or the minutes are used up."""
    streams = read_streams(tokenizer, text)
    rng = np.random.default_rng(options.seed)
    state = init_optimizer(learnt_leaves(model.params))
    gradient = torch.func.grad_and_value(loss_of)
    losses: list[float] = []
    begin = saved = time.monotonic()

    first = RESUMED_PART if options.start else 0.0

    def part_done() -> float:
        done = len(losses) / options.steps if options.steps else (time.monotonic() - begin) / (60 * options.minutes)
        return first + (1 - first) * done

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(elapsed_when_finished=True))
    with Progress(*columns) as progress:
        task = progress.add_task("", total=1.0)
        while (part := part_done()) < 1.0:
            windows = draw_batch(streams, rng, *batch_shape(part, len(losses)))
            learnt = learnt_leaves(model.params)
            grads, loss = gradient(learnt, model, windows)
            state, learnt = optimizer_step(state, grads, learnt, learning_rate(part))
            model = attrs.evolve(model, params=with_leaves(model.params, learnt))
            if len(losses) % BALANCE_EVERY == 0:
                model = attrs.evolve(model, params=balance_experts(model, windows))
            losses.append(loss.item())
            speed = len(losses) * STEP_TOKENS / (time.monotonic() - begin)
            recent = sum(losses[-50:]) / len(losses[-50:])
            progress.update(
                task,
                completed=part_done(),
                description=f"step {len(losses)}  {recent:.3f} nats a token  {speed:.0f} tokens/s",
            )
            if options.out and time.monotonic() - saved > SAVE_SECONDS:
                save(options.out, model.params, tokenizer, losses)
                saved = time.monotonic()
    return model.params, losses


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="train so many steps, repeatably, instead of by time")
    parser.add_argument("--minutes", type=float, default=30.0, help="train for so long (default: 30)")
    parser.add_argument("--start", type=Path, help="go on from this checkpoint and average with it")
    parser.add_argument("--out", type=Path, help="folder to write the checkpoint to; without it nothing is written")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train tokenizer and model, measure on the held-out books, write."""
    options = parse_options()
    text, heldout = read_text("kjv-train.txt.xz"), read_text("kjv-heldout.txt")
    if options.steps and options.steps < QUICK_STEPS:
        text, heldout = text[:QUICK_TEXT], heldout[:QUICK_BYTES]
    tokenizer = train_tokenizer(text, CONFIG.vocab_size)
    if options.start:
        params = read_checkpoint(options.start, dtype=torch.float32)[1]
    else:
        params = init_params(CONFIG, torch.Generator().manual_seed(options.seed), torch.float32)
    model = Model(config=CONFIG, params=params, numerics=Numerics.plain(), ops=REFERENCE, dtype=torch.float32)
    params, losses = train(model, tokenizer, text, options)
    if options.start:
        params = average(params, model.params)
    if options.out:
        save(options.out, params, tokenizer, losses)
    ids = [CONFIG.bos_token_id, *tokenizer.encode(heldout).ids]
    bits = bits_per_byte(attrs.evolve(model, params=params), ids, len(heldout.encode()))
    print(f"{len(losses)} steps, {len(losses) * STEP_TOKENS} tokens: {bits:.3f} bits a byte on text never trained on")


if __name__ == "__main__":
    main()
