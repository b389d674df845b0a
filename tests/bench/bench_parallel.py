"""What every layout over ranks costs a decode step: bytes that a rank sends, beside the formulas, and time.

PYTHONPATH=tests python tests/bench/bench_parallel.py --case small --batch 4 --context 600

All ranks share this machine's cores, so times say what a layout adds, not what more machines would take away.
"""

from __future__ import annotations

import argparse
import tempfile
from math import comb
from pathlib import Path
from typing import Any

import harness
import purestep as ps
from kit.rank_bench import Measured, measure
from kit.ranks import rank_pool
from purestep.ops.vocabulary import shard_rows
from purestep.serving.bench_steps import write_case
from purestep.state.config import Config

LAYOUTS = {
    2: [
        {"tp": 2},
        {"tp": 2, "dcp": 2},
        {"tp": 2, "ep": 2, "moe": "ep"},
        {"dp": 2},
        {"dp": 2, "dp_lm_head": True},
        {"dp": 2, "lm_head_all_to_all": True},
        {"dp": 2, "ep": 2, "moe": "ep"},
    ],
    4: [{"tp": 4}, {"tp": 2, "dp": 2}, {"tp": 2, "dp": 2, "ep": 4, "moe": "ep"}, {"dp": 4}],
}

F32 = 4


def sent(kind: str, n: int, size: float) -> float:
    """Return the bytes that a rank sends for an operand of ``size`` bytes (ring algorithms)."""
    return {"reduce": 2 * (n - 1) / n, "gather": n - 1, "scatter": (n - 1) / n, "exchange": (n - 1) / n}[kind] * size


def formula(config: Config, parallel: ps.Parallel, batch: int, entries: int) -> dict[str, float]:
    """Compute what a rank sends in a decode step, by part of the model; float32, equal rows on all replicas.

    Args:
        config: the model's numbers.
        parallel: the layout.
        batch: rows of every replica.
        entries: C4 entries that every row has, the padding of its pages included where they are dealt.
    """
    n, tp, layers, hidden = parallel.ranks, parallel.tp, config.num_hidden_layers, config.hidden_size
    chunk = -(-batch // tp)
    row = batch * hidden * F32
    found = {"announcement": sent("gather", n, 6 * 8), "embedding": sent("reduce", tp, row) if tp > 1 else 0.0}
    attention = layers * sent("reduce", tp, row) if tp > 1 else 0.0
    n_choosing = config.n_layers_of_ratio(4) if entries > config.index_topk else 0
    if parallel.dcp > 1:
        heads = config.num_attention_heads // tp
        attention += layers * sent("gather", tp, batch * heads * config.head_dim * F32)
        attention += layers * sent("exchange", tp, batch * heads * tp * (config.head_dim + 1) * F32)
        index_heads = config.index_n_heads // tp
        index = sent("gather", tp, batch * index_heads * (config.index_head_dim + 1) * F32)
        index += sent("gather", tp, batch * entries // tp * F32)
        found["index scores"] = n_choosing * index
    elif tp > 1:
        found["index scores"] = n_choosing * sent("reduce", tp, batch * entries * F32)
    found["attention"] = attention
    found["experts"] = layers * _experts(config, parallel, batch, chunk)
    if parallel.dp == 1 or parallel.dp_lm_head:
        group = tp
        found["head"] = sent("gather", group, batch * shard_rows(config.vocab_size, group) * F32) if group > 1 else 0.0
    else:
        rows, part = parallel.dp * batch, shard_rows(config.vocab_size, n)
        kind = "exchange" if parallel.lm_head_all_to_all else "gather"
        found["head"] = sent("reduce", n, rows * hidden * F32) + sent(kind, n, rows * part * F32)
    return found


def _experts(config: Config, parallel: ps.Parallel, batch: int, chunk: int) -> float:
    n, tp, hidden, k = parallel.ranks, parallel.tp, config.hidden_size, config.num_experts_per_tok
    if parallel.moe == "ep":
        # A row goes to a rank unless all its choices lie elsewhere; routing is taken as uniform.
        experts, own = config.n_routed_experts, config.n_routed_experts // n
        rows = chunk * n * (1 - comb(experts - own, k) / comb(experts, k))
        exchanged = sent("exchange", n, rows * (hidden * F32 + 2 * k * F32 + hidden * F32) + n * 8)
        return exchanged + (sent("gather", tp, chunk * hidden * F32) if tp > 1 else 0.0)
    if parallel.dp == 1:
        return sent("reduce", n, batch * hidden * F32)
    gathered = sent("gather", n, chunk * (hidden + 2 * k) * F32)
    returned = sent("scatter", n, chunk * n * hidden * F32)
    return gathered + returned + (sent("gather", tp, chunk * hidden * F32) if tp > 1 else 0.0)


def row_of(layout: dict[str, Any], found: Measured, expected: dict[str, float], alone: float) -> dict[str, Any]:
    moved = sum(one.moved for one in found.collectives)
    return {
        "layout": " ".join(f"{name}={value}" for name, value in layout.items()) or "one process",
        "collectives": sum(one.count for one in found.collectives),
        "bytes sent": moved,
        "formula": round(sum(expected.values())),
        "ms": found.milliseconds,
        "over one process": found.milliseconds / alone,
    }


def main() -> None:
    """Measure one process and every layout, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(harness.CASES), default="tiny")
    parser.add_argument("--batch", type=int, default=4, help="rows of every replica")
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    arguments = parser.parse_args()
    config = harness.CASES[arguments.case]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_case(config, "float32", Path(folder))
        numbers = ps.load_model(folder).config
        sizes = (folder, arguments.batch, arguments.context, arguments.steps)
        alone = measure(ps.Parallel(), *sizes)
        rows.append(row_of({}, alone, {}, alone.milliseconds))
        for n in arguments.ranks:
            with rank_pool(n) as pool:
                for layout in LAYOUTS[n]:
                    parallel = ps.Parallel(**layout)
                    found = pool.same(measure, parallel, *sizes, limit_s=600.0)[0]
                    # The step that is counted comes after those that are timed, and feeds one token more.
                    entries = (arguments.context + arguments.steps + 1) // 4
                    entries = -(-entries // 32) * 32 if parallel.dcp > 1 else entries
                    expected = formula(numbers, parallel, arguments.batch, entries)
                    rows.append(row_of(layout, found, expected, alone.milliseconds))
    harness.report(f"{arguments.case}, batch {arguments.batch}, context {arguments.context}", rows)


if __name__ == "__main__":
    main()
