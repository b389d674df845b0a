"""Products with FP4 weights beside bfloat16 ones and beside the time that reading bfloat16 takes.

A quarter of the bytes helps only if unpacking keeps up with memory. ``tiles`` is what stored experts run with;
``generated`` unpacks with bit operations inside the compiler's loop, so that no number is ever stored; ``bfloat16`` is
the compiled product on expanded weights. One expert's matrix of V4-Flash, its copies in turn, so none is in a cache.

python tests/bench/bench_stored.py --batch 1 2 4
"""

from __future__ import annotations

import argparse

import harness
import torch
from purestep.ops import tiles, traced
from purestep.ops.formats import GROUP, Fp4Weight, expand, fp4_weight
from purestep.ops.graph import compile_graph
from purestep.ops.kept import kept
from purestep.serving.bench_cases import probe_machine
from purestep.serving.bench_steps import alternate, median_ms

WIDTH, N_ROWS, COPIES = 4096, 4096, 6


def unpacked(code: torch.Tensor) -> torch.Tensor:
    """Move the bits of e2m1 codes i32 to where f32 has them, for a value 2 ** 126 too small; exact."""
    return (((code & 7) << 22) | ((code & 8) << 28)).view(torch.float32)


def generated(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply rows by an FP4 weight: float[T,H], u8[F,H/2], u8[F,H/32] -> float[T,F]."""
    wide = codes.int()
    low, high = unpacked(wide & 15), unpacked(wide >> 4)
    # What the bits lack is made up for in two halves, for neither to leave the range of f32.
    even, odd = (kept(x[:, at::2].float() * 2.0**64) for at in (0, 1))
    factors = ((scales.int() << 23).view(torch.float32) * 2.0**62).unsqueeze(-1)
    pairs = [(low * even[at] + high * odd[at]).unflatten(-1, (-1, GROUP // 2)) for at in range(len(x))]
    sums = [(pair * factors).sum((-2, -1)) for pair in pairs]
    return torch.stack(sums).to(x.dtype)


def main() -> None:
    """Measure every batch and print numbers of weights a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    stored = fp4_weight(torch.randn(N_ROWS, WIDTH, generator=torch.Generator().manual_seed(0)) * 0.02)
    packed = [Fp4Weight(*(part.clone() for part in stored)) for _ in range(COPIES)]
    whole = [expand(stored, torch.bfloat16).clone() for _ in range(COPIES)]
    rows = []
    for batch in options.batch:
        x = torch.randn(batch, WIDTH).to(torch.bfloat16)
        bits = [(one.codes, one.scales.view(torch.uint8)) for one in packed]
        unpacking, plain = compile_graph(generated, (x, *bits[0])), compile_graph(traced.linear, (x, whole[0]))
        torch.testing.assert_close(unpacking([x, *bits[0]])[0], plain([x, whole[0]])[0], atol=0.01, rtol=0.01)
        turn = iter(range(10**9))
        runs = {
            "tiles": lambda x=x, turn=turn: tiles.linear(x, packed[next(turn) % COPIES]),
            "generated": lambda x=x, turn=turn, run=unpacking, bits=bits: run([x, *bits[next(turn) % COPIES]]),
            "bfloat16": lambda x=x, turn=turn, run=plain: run([x, whole[next(turn) % COPIES]]),
        }
        times = {name: median_ms(found) for name, found in alternate(runs, options.rounds).items()}
        times["read bfloat16"] = 2e3 * WIDTH * N_ROWS / probe_machine(torch.bfloat16).read
        rows += [
            {"bench": "stored", "batch": batch, "how": how, "ms": ms, "weights_per_ns": WIDTH * N_ROWS / ms / 1e6}
            for how, ms in times.items()
        ]
    harness.report("one 4096 x 4096 weight", rows)


if __name__ == "__main__":
    main()
