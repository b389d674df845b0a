"""The request table and the allocators: who owns which row, page and slot.

All of it is host data: allocation decisions are made from host mirrors of lengths, and what a device needs is copied
into each ``ForwardBatch``. The tables lie behind one persistent handle, the free lists are persistent sequences, so a
table of any earlier step stays exactly what it was.

============= ================= =======================================================================
buffer        shape token       content
============= ================= =======================================================================
req_to_token  i32[(B+1)*S]      row-major [row, position] -> full slot; row 0 is all zeros
full_to_swa   i64[S]            full slot -> window slot, 0 = no peer; the last entry is -1, so that -1 maps to -1
sidecar       i32[(B+1)*C]      row-major [row, group div 16] -> C128 page, 0 = none
page_refs     i32[S]            requests that name a full page
swa_refs      i32[S]            requests whose window has not passed a window page
c128_refs     i32[S]            requests that name a C128 page
============= ================= =======================================================================

Source: SGLang 0.5.23 ``mem_cache/allocation.py``, ``mem_cache/allocator/swa.py`` and
``hardware_backend/npu/dsv4/dsv4_allocator.py`` (rules); decode-path sheet 1.3, 4.1-4.5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from .capacity import PoolSizes
from .handles import Handle, create_handle
from .pages import FreeList
from .values import value

__all__ = ["Edit", "RequestTable", "init_table", "read_table", "write_table"]

Edit = tuple[str, NDArray[np.int64], "NDArray[np.int64] | int"]
"""Buffer name, entries, new values."""


@value
@attrs.frozen(eq=False, kw_only=True)
class RequestTable:
    """One version of the request table.

    Attributes:
        sizes: numbers of pages and rows.
        handle: the tables above.
        free_rows: request rows nobody owns.
        free_pages: full pages nobody names.
        free_swa_pages: window pages nobody uses.
        free_c128_pages: C128 pages nobody names.
    """

    sizes: PoolSizes
    handle: Handle
    free_rows: FreeList
    free_pages: FreeList
    free_swa_pages: FreeList
    free_c128_pages: FreeList


def init_table(sizes: PoolSizes, device: torch.device | None = None) -> RequestTable:
    """Build the empty table.

    Args:
        sizes: numbers of pages and rows.
        device: default the host, where tables live; "meta" for shapes alone.
    Returns:
        A table in which every row and page is free.
    """
    full_to_swa = torch.zeros((sizes.pages + 1) * sizes.page_size + 1, dtype=torch.int64, device=device)
    full_to_swa[-1] = -1
    return RequestTable(
        sizes=sizes,
        handle=create_handle(
            {
                "req_to_token": torch.zeros((sizes.requests + 1) * sizes.context, dtype=torch.int32, device=device),
                "full_to_swa": full_to_swa,
                "sidecar": torch.zeros((sizes.requests + 1) * sizes.sidecar_width, dtype=torch.int32, device=device),
                "page_refs": torch.zeros(sizes.pages + 1, dtype=torch.int32, device=device),
                "swa_refs": torch.zeros(sizes.swa_pages + 1, dtype=torch.int32, device=device),
                "c128_refs": torch.zeros(sizes.c128_pages + 1, dtype=torch.int32, device=device),
            }
        ),
        free_rows=FreeList.full(sizes.requests, "requests"),
        free_pages=FreeList.full(sizes.pages, "full pages"),
        free_swa_pages=FreeList.full(sizes.swa_pages, "window pages"),
        free_c128_pages=FreeList.full(sizes.c128_pages, "C128 pages"),
    )


@contextmanager
def read_table(table: RequestTable) -> Iterator[Mapping[str, NDArray[np.int64]]]:
    """Look at the buffers of one version as numpy arrays; copy what outlives the block."""
    with table.handle.read() as tensors:
        yield {name: tensor.numpy() for name, tensor in tensors.items()}


def write_table(table: RequestTable, edits: Sequence[Edit]) -> Handle:
    """Apply edits in order and return the handle of the new version; a later edit of an entry wins.

    Args:
        table: the version to change.
        edits: buffer, entries, values.
    Returns:
        The new version's handle; ``table`` keeps its content.
    """
    touched: dict[str, NDArray[np.int64]] = {}
    edits = [edit for edit in edits if len(edit[1])]
    for name, entries, _ in edits:
        touched[name] = np.concatenate((touched[name], entries)) if name in touched else entries
    rows = {name: torch.from_numpy(entries) for name, entries in touched.items()}
    with table.handle.write(rows) as write:
        for name, entries, values in edits:
            write.tensors[name].numpy()[entries] = values
    return write.handle
