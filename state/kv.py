"""The cache contents of all layers behind one persistent handle.

=========== ==================== ==================================================================================
buffer      shape token          content
=========== ==================== ==================================================================================
swa         float[L*S,D]         window entries of every layer, by window slot
c4          float[L*S,D]         compressed entries of ratio-4 layers, by full slot div 4
index       float[L*S,J]         index keys of ratio-4 layers, by full slot div 4; i8 in the Ascend form
index_scale f16[L*S,1]           scale of every index key; in the Ascend form only
c128        float[L*S,D]         compressed entries of ratio-128 layers, by C128 slot
c4_state    f32[L*S,4*D]         pooling state: ring of 8 rows per window page, values then scores (halves a, b each)
index_state f32[L*S,4*J]         the same for the index keys
c128_state  f32[L*S,2*D]         pooling state: ring of 128 rows per request row; online f32[L*S,3*D], one row
=========== ==================== ==================================================================================

Rows are layer-major; row (layer, slot) is ``layer * slots + slot``, the layer counted within its kind. The last slot of
a state buffer is the dummy: value 0, score -inf.

A *form* says how entries, index keys and the C128 pooling state are stored; what they are, the model's numerics say. So
every form of one model holds the same numbers, and quantised rows only take what is rounded to them already:

==================== ==================== ==================== ============ ========================================
form                 entry                index key            C128 state   fits numerics with
==================== ==================== ==================== ============ ========================================
plain, online        dtype: 1024 bytes    dtype: 256 bytes     ring, online any (online: no rounding of pooling)
fp8, fp8-online      FP8: 584 bytes       FP8: 132 bytes       ring, online ``kv_qdq``, ``indexer_qdq="fp8"``
fp4, fp4-online      FP8: 584 bytes       FP4: 68 bytes        ring, online ``kv_qdq``, ``indexer_qdq=True`` (official)
ascend               dtype: 1024 bytes    int8: 130 bytes      ring         ``ascend()``, on Ascend kernels
packed               FP8: 640 bytes       FP8: 132 bytes       ring         ``ascend_a5()``, on Ascend kernels of the A5
==================== ==================== ==================== ============ ========================================

An FP8 entry is one row of bytes: e4m3 codes of the channels that do not rotate, the rotary ones in the dtype, a
power-of-two scale for every 64 codes, zeros up to a multiple of 8. An FP8 key is its codes and an f32 scale, an FP4 key
two codes a byte (the even channel low) and a power-of-two scale for every 32. Bytes are those of the released models in
bfloat16. In the packed form the order inside an entry is the kernels', zeros go up to a multiple of 128, and an index
key's scale lies in a buffer of its own. The online state is (weighted sum, sum of weights, largest score) of the group
that is open.

Source: SGLang 0.5.23 ``mem_cache/deepseek_v4_memory_pool.py``, ``deepseek_v4_compress_state.py`` (what exists);
decode-path sheet 4.1, 4.5; model sheet 2.8 (online pooling), 6.4 (sizes of rows).
"""

from __future__ import annotations

from math import lcm
from typing import Final, Literal

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from .capacity import C4_RATIO, C128_PAGE, C128_RATIO, PoolSizes
from .config import Config
from .errors import ConfigError
from .handles import Handle, create_handle
from .values import value

__all__ = [
    "BLOCK_ROWS",
    "C4_RING",
    "C128_RING",
    "CACHE_FORMS",
    "FP4_GROUP",
    "FP8_GROUP",
    "MAX_BLOCK",
    "CacheForm",
    "KVLayout",
    "KVState",
    "init_kv",
    "row_specs",
]

C4_RING: Final = 8
"""State rows per window page: the group being filled and the one before it."""

C128_RING: Final = 128
"""State rows per request: the group being filled."""

CacheForm = Literal["plain", "online", "fp8", "fp8-online", "fp4", "fp4-online", "ascend", "packed"]
"""How caches are stored; those of Ascend kernels, the last two, are read by tables of pages."""

CACHE_FORMS: Final[tuple[CacheForm, ...]] = (
    *("plain", "online", "fp8", "fp8-online", "fp4", "fp4-online"),
    *("ascend", "packed"),
)

FP8_GROUP: Final = 64
"""Channels that share a scale in rounded window and attention entries."""

FP4_GROUP: Final = 32
"""Channels that share a scale in rounded index queries and keys."""

_ALIGNMENT: Final = 8
"""Rows of bytes are padded to a multiple of this."""

_PACKED_ALIGNMENT: Final = 128
"""The same for Ascend kernels of the A5."""

BLOCK_ROWS: Final = 16
"""Ascend kernels take cache blocks of a multiple of this many rows."""

MAX_BLOCK: Final = 1024
"""Rows of their largest block."""


def _state_rows(size: int, ring: int, ratio: int) -> int:
    step = lcm(ratio, ring)
    return -(-(size + ring + 1) // step) * step


@attrs.frozen(kw_only=True)
class KVLayout:
    """Where everything lies in the buffers of a ``KVState``; plain numbers.

    Attributes:
        sizes: numbers of pages and rows.
        kinds: compress ratio of every layer.
        places: index of every layer within its kind (in the ratio-4 or ratio-128 buffers).
        form: how they are stored.
        dtype: of entries that are not quantised.
        ways: ranks that every page of entries is dealt to, a block each; pooling state is whole on all of them.
        share: which of them this is.
    """

    sizes: PoolSizes
    kinds: tuple[int, ...]
    places: tuple[int, ...]
    form: CacheForm = "plain"
    dtype: torch.dtype = torch.float32
    ways: int = 1
    share: int = 0

    @property
    def has_fp8_rows(self) -> bool:
        """Whether entries are FP8 rows."""
        return self.form.startswith(("fp8", "fp4"))

    @property
    def is_online(self) -> bool:
        """Whether the C128 pooling state is that of an online softmax."""
        return self.form.endswith("online")

    @property
    def c128_ring(self) -> int:
        """Rows of C128 pooling state per request row."""
        return 1 if self.is_online else C128_RING

    def c128_bank(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """List the slots of C128 pooling state that belong to request rows."""
        return (rows[:, None] * self.c128_ring + np.arange(self.c128_ring)).reshape(-1)

    def open_c128(self, row: int, length: int) -> NDArray[np.int64]:
        """List the slots in which a request of some length keeps the group of 128 that is open."""
        n_open = length % C128_RATIO
        return row * self.c128_ring + np.arange(min(n_open, self.c128_ring))

    @property
    def is_paged(self) -> bool:
        """Whether the readers are Ascend kernels, which read by tables of pages."""
        return self.form in ("ascend", "packed")

    @classmethod
    def of(
        cls,
        config: Config,
        sizes: PoolSizes,
        form: CacheForm = "plain",
        dtype: torch.dtype = torch.float32,
        ways: int = 1,
        share: int = 0,
    ) -> KVLayout:
        """Lay out the caches of a model.

        Raises:
            ConfigError: the kernels that read them do not take such pages, or pages cannot be dealt evenly.
        """
        if sizes.page_size % (C4_RATIO * ways) or C128_PAGE % ways:
            raise ConfigError(
                f"page_size: expected a multiple of {C4_RATIO * ways} to deal pages to {ways} ranks (a divisor of "
                f"{C128_PAGE}), got {sizes.page_size}",
                field="page_size",
                expected=f"multiple of {C4_RATIO * ways}",
                got=sizes.page_size,
            )
        step = BLOCK_ROWS * C4_RATIO
        if form in ("ascend", "packed") and (sizes.page_size % step or sizes.page_size > MAX_BLOCK):
            raise ConfigError(
                f"page_size: expected a multiple of {step}, at most {MAX_BLOCK}, for Ascend kernels, got "
                f"{sizes.page_size}; 128 is what production uses",
                field="page_size",
                expected=f"multiple of {step}",
                got=sizes.page_size,
            )
        seen = {0: 0, C4_RATIO: 0, C128_RATIO: 0}
        places = []
        for ratio in config.compress_ratios:
            places.append(seen[ratio])
            seen[ratio] += 1
        kinds = tuple(config.compress_ratios)
        return cls(sizes=sizes, kinds=kinds, places=tuple(places), form=form, dtype=dtype, ways=ways, share=share)

    def n_layers(self, name: str) -> int:
        """Layers that a buffer holds."""
        if name == "swa":
            return len(self.kinds)
        if name == "index_scale" and not self.is_paged:
            return 0
        return self.kinds.count(C128_RATIO if name.startswith("c128") else C4_RATIO)

    def n_slots(self, name: str) -> int:
        """Slots of a buffer per layer on this rank, sink page included."""
        sizes = self.sizes
        match name:
            case "swa":
                return (sizes.swa_pages + 1) * self.block(name)
            case "c4" | "index" | "index_scale":
                return (sizes.pages + 1) * self.block(name)
            case "c128":
                return (sizes.c128_pages + 1) * self.block(name)
            case "c4_state" | "index_state":
                return _state_rows(sizes.swa_pages * C4_RING, C4_RING, C4_RATIO)
        assert name == "c128_state", f"no buffer is called {name!r}"
        return _state_rows(sizes.requests * self.c128_ring, self.c128_ring, self.c128_ring)

    def block(self, name: str) -> int:
        """Slots of a page of entries on this rank."""
        whole = self.sizes.page_size if name == "swa" else C128_PAGE if name == "c128" else self.sizes.c4_page
        return whole // self.ways

    def is_here(self, name: str, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which slots lie on this rank: of every page the rank's block, and all of a pooling state."""
        if self.ways == 1 or name.endswith("_state"):
            return np.ones(slots.shape, bool)
        return slots // self.block(name) % self.ways == self.share

    def local(self, name: str, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find where slots lie on this rank; those that do not are sent to the sink."""
        if self.ways == 1 or name.endswith("_state"):
            return slots
        block = self.block(name)
        rows = slots // (block * self.ways) * block + slots % block
        return np.where(self.is_here(name, slots), rows, 0)

    def rows(self, name: str, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """List the buffer rows of those slots that lie on this rank, in every layer, layer-major."""
        mine = self.local(name, slots[self.is_here(name, slots)])
        return (np.arange(self.n_layers(name))[:, None] * self.n_slots(name) + mine).reshape(-1)

    def dummy(self, name: str) -> int:
        """Slot of the dummy row of a state buffer."""
        return self.n_slots(name) - 1

    def first_score(self, name: str, width: int) -> int:
        """Return the channel of a state row of some width from which on an empty row holds -inf, and not 0."""
        return width * 2 // 3 if name == "c128_state" and self.is_online else width // 2

    def place(self, name: str, layer: int) -> int:
        """Index of ``layer`` within a buffer."""
        return layer if name == "swa" else self.places[layer]

    def buffers_of(self, layer: int) -> tuple[str, ...]:
        """Names of the buffers that a layer writes."""
        ratio = self.kinds[layer]
        if ratio == C4_RATIO:
            scales = ("index_scale",) if self.is_paged else ()
            return ("swa", "c4", "index", *scales, "c4_state", "index_state")
        return ("swa", "c128", "c128_state") if ratio == C128_RATIO else ("swa",)


@value
@attrs.frozen(eq=False, kw_only=True)
class KVState:
    """One version of the cache contents.

    Attributes:
        layout: where everything lies.
        handle: the buffers above.
    """

    layout: KVLayout
    handle: Handle

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the entries, as they are read."""
        return self.layout.dtype

    @property
    def device(self) -> torch.device:
        """Where the caches lie."""
        return self.handle.spec("swa")[2]


def row_specs(
    config: Config, form: CacheForm, dtype: torch.dtype, key_dtype: torch.dtype | None = None
) -> dict[str, tuple[int, torch.dtype]]:
    """Say what one row of every buffer is.

    Args:
        config: the model's numbers.
        form: how caches are stored.
        dtype: of entries that are not quantised.
        key_dtype: of index keys that are not quantised; default ``dtype``.
    Returns:
        Width and dtype by buffer.
    """
    width, keys, tail = config.head_dim, config.index_head_dim, config.qk_rope_head_dim
    entry, key = (width, dtype), (keys, key_dtype or dtype)
    n_bytes = width - tail + tail * dtype.itemsize + -(-(width - tail) // FP8_GROUP)
    if form == "packed":
        entry = (-(-n_bytes // _PACKED_ALIGNMENT) * _PACKED_ALIGNMENT, torch.uint8)
        key = (keys, torch.uint8)
    if form.startswith(("fp8", "fp4")):
        entry = (-(-n_bytes // _ALIGNMENT) * _ALIGNMENT, torch.uint8)
        fp8, fp4 = keys + torch.float32.itemsize, -(-keys // 2) + -(-keys // FP4_GROUP)
        key = (fp8 if form.startswith("fp8") else fp4, torch.uint8)
    specs = {
        "swa": entry,
        "c4": entry,
        "index": key,
        "c128": entry,
        "c4_state": (4 * width, torch.float32),
        "index_state": (4 * keys, torch.float32),
        "c128_state": ((3 if form.endswith("online") else 2) * width, torch.float32),
    }
    if form == "ascend":
        specs |= {"index": (keys, torch.int8), "index_scale": (1, torch.float16)}
    if form == "packed":
        specs |= {"index_scale": (1, torch.float32)}
    return specs


def init_kv(
    config: Config,
    sizes: PoolSizes,
    dtype: torch.dtype,
    device: torch.device,
    form: CacheForm = "plain",
    key_dtype: torch.dtype | None = None,
    ways: int = 1,
    share: int = 0,
) -> KVState:
    """Allocate empty caches.

    Args:
        config: the model's numbers.
        sizes: numbers of pages and rows.
        dtype: of entries; pooling state is f32.
        device: where they lie.
        form: how they are stored.
        key_dtype: of index keys, where they are not quantised; default ``dtype``.
        ways: ranks that entries are dealt to.
        share: which of them this is.
    Returns:
        Zeroed pools and states of (value 0, score -inf).
    """
    layout = KVLayout.of(config, sizes, form, dtype, ways, share)
    buffers = {}
    for name, (width, kind) in row_specs(config, form, dtype, key_dtype).items():
        n_rows = layout.n_layers(name) * layout.n_slots(name)
        if not n_rows:
            continue
        buffer = torch.zeros((n_rows, width), dtype=kind, device=device)
        if name.endswith("_state"):
            buffer[:, layout.first_score(name, width) :] = -torch.inf
        buffers[name] = buffer
    return KVState(layout=layout, handle=create_handle(buffers))
