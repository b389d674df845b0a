"""Write, as JSON, the shapes that the simulator gives without looking at values."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from ascend_lane.calls import CALLS, described, meta
from ascend_sim.simulator import simulate


def shapes(release: str) -> dict[str, Any]:
    """Describe the result of every call."""
    found: dict[str, Any] = {}
    for chip in ("a3", "a5"):
        with simulate(chip=chip, torch_npu=release):
            found |= {name: described(call()) for name, (where, call) in CALLS.items() if where == chip}
            if chip == "a3":
                gate = torch.ops.custom.npu_moe_gating_top_k(meta(32, 256, dtype=torch.float32), 6, norm_type=1)
                found["gate"] = described(gate)
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(shapes(sys.argv[1])))
