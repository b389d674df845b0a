"""Write, as JSON, where the schemas that stand as text in a torch-npu library differ from the records."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from purestep.ops.ascend.schemas import load_schemas, same_contract


def texts(raw: bytes) -> dict[str, set[str]]:
    """Find the texts that register npu operators: qualified name -> texts."""
    found: dict[str, set[str]] = {}
    for match in re.finditer(rb"(?<=\x00)(?:npu::)?(npu_[\w.]+)\([^\x00]*\) *-> *[^\x00]+", raw):
        found.setdefault(f"npu::{match[1].decode()}", set()).add(f"npu::{match[0].decode().removeprefix('npu::')}")
    return found


def differences(release: str, raw: bytes) -> tuple[int, list[str]]:
    """Compare every record of a release: (how many, what differs)."""
    records = [r for r in load_schemas() if r.provider == "torch-npu" and release in r.releases]
    there, found = texts(raw), []
    for record in records:
        candidates = sorted(there.get(record.qualified_name, ()))
        if not candidates:
            found.append(f"{record.qualified_name}: recorded, not in the binary")
        elif not any(same_contract(record.text, text) for text in candidates):
            found.append(f"{record.qualified_name}: recorded {record.text}, binary {' or '.join(candidates)}")
    return len(records), found


if __name__ == "__main__":
    compared, differs = differences(sys.argv[1], Path(sys.argv[2]).read_bytes())
    Path(sys.argv[3]).write_text(json.dumps({"compared": compared, "schemas": differs}))
