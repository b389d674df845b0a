"""Write, as JSON, where the live torch-npu differs from the records, and the shapes that it gives."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch_npu  # noqa: F401  registers the operators
from ascend_lane.calls import CALLS, described, gate
from purestep.ops.ascend.schemas import RecordedSchema, load_schemas, same_contract


def live(record: RecordedSchema) -> str:
    """The text that is registered under a record's name, or nothing."""
    packet = getattr(getattr(torch.ops, record.namespace), record.name, None)
    if packet is None or record.overload not in packet.overloads():
        return ""
    return str(getattr(packet, record.overload)._schema)


def shape_of(call: Any) -> Any:
    """Shapes of a call, or what it complains about."""
    try:
        return described(call())
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]


records = [r for r in load_schemas() if r.provider == "torch-npu" and sys.argv[1] in r.releases]
differs = []
for one in records:
    found = live(one)
    if not found:
        differs.append(f"{one.qualified_name}: recorded, not registered")
    elif not same_contract(one.text, found):
        differs.append(f"{one.qualified_name}: recorded {one.text}, live {found}")
names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("npu::")}
report = {
    "schemas": differs,
    "compared": len(records),
    "registered": len(names),
    "shapes": {name: shape_of(call) for name, (_, call) in CALLS.items()} | {"gate": shape_of(gate)},
}
Path(sys.argv[2]).write_text(json.dumps(report))
