"""Persistent handles: many immutable versions over one set of mutable buffers.

Device memory is too large to copy for every step, so all versions of a set of buffers share the same tensors, whose
addresses never change. The buffers hold the content of one version, the *root*. Every other version is a difference
to a neighbour: it equals that neighbour except that the named rows held something else::

    v1 --{row 3: a}--> v2 --{row 7: b}--> v3 = buffers        v1 is v2 with a in row 3, v2 is v3 with b in row 7

Writing rows of the root saves them first; the old root becomes a difference to the new one. Reading or writing any
other version first *re-roots*: walking back from the root, each difference is swapped with the rows it displaces, so
every arrow on the way turns round and nothing is lost. Writing row 3 from ``v1`` after that makes a branch::

    v3 --{row 7: d}--> v2 --{row 3: c}--> v1 --{row 3: a}--> v4 = buffers

(After H. G. Baker, "Shallow binding makes functional arrays fast", 1991.)

What is kept
    Arrows are strong references and lead to the root, so a version that nobody holds and that no other version needs
    vanishes by reference counting, its saved rows with it: a linear chain keeps nothing. A version that nobody holds
    but that exactly one other needs is merged into that one's difference, inside the next write. One that several
    others need stays and is shared by them. With ``k`` held versions, the newest among them, at most ``2 k - 3``
    differences are left, each with at most the distinct rows written since; with one older version, exactly those.

What makes it safe
    Buffers and root are changed by ``_Buffers.finish`` alone, which carries out a written intent and may be cut off and
    repeated anywhere. A write announces "back to this version" before its body runs, and replaces that by "on to the
    new version" afterwards: that one assignment is the commit. Every entry first finishes what it finds, so an
    interrupt at any moment harms no version. Merging only gives a difference rows that it inherits anyway, and then
    leads its arrow past the version they came from; so who counts as held decides about memory, never about content.

What it costs
    Time and memory follow the rows touched, never the size of a buffer (but for ``deepcopy`` and ``pickle``).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock, RLock
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

from .errors import DtypeError, ShapeError, StateBusyError

__all__ = ["Handle", "Write", "create_handle"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def create_handle(tensors: Mapping[str, Tensor]) -> Handle:
    """Take tensors over as buffers and return the handle of their first version.

    Args:
        tensors: name to tensor; dim 0 counts the rows. They become the live buffers, uncopied: the caller must neither
            change them any more nor pass tensors that overlap.
    Raises:
        DtypeError: when a value is no tensor, or is one that torch refuses to write in place later.
        ShapeError: when a tensor has no dim 0.
    """
    for name, tensor in tensors.items():
        where = f"create_handle: {name}: expected a plain tensor"
        if not isinstance(tensor, Tensor) or tensor.is_inference():
            got = "an inference tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise DtypeError(f"{where}, got {got}; create it outside torch.inference_mode", field=name, got=got)
        if tensor.dim() == 0:
            raise ShapeError(f"{where} with rows in dim 0, got no dims; reshape it to [1]", field=name, got=())
    buffers = _Buffers({name: tensor.detach() for name, tensor in tensors.items()})
    return buffers.handle_of(buffers.root)


@attrs.frozen(eq=False, repr=False)
class Handle:
    """One immutable version of a whole set of buffers; make the first one with ``create_handle``.

    A handle is compared by identity and is one opaque leaf of a pytree. ``deepcopy`` and ``pickle`` take the content of
    its version into new, independent buffers.

    Asking for content of any version from inside a ``write`` or ``read`` body of the same buffers raises
    ``StateBusyError``; other threads wait until the body has ended. Rows that do not fit the buffers raise
    ``ShapeError`` or ``DtypeError``, before anything changes.
    """

    _buffers: _Buffers
    _node: _Node

    @contextmanager
    def write(self, rows: Mapping[str, Tensor]) -> Iterator[Write]:
        """Make a new version by writing rows in place; this version stays what it is.

        If the body raises anything at all, the rows are put back, the exception goes on and there is no new version.

        Args:
            rows: name to i64[n], the dim-0 rows that the body will write; repeats are allowed, a name left out is not
                written. Merging needs the numbers on the host: given there, they spare an accelerator a read-back.
        """
        buffers = self._buffers
        with buffers.rooted_at(self._node):
            buffers.merge_dropped()
            saved = buffers.save(rows)
            write = Write(buffers.tensors)
            try:
                buffers.intent = _Intent(self._node, saved)
                yield write
                version = buffers.handle_of(_Node())
                buffers.intent = _Intent(version._node, {}, (self._node, saved))
                buffers.finish()
                write._handle = version
            except BaseException:
                buffers.finish()
                raise

    def read(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Lend the live buffers at this version, by name; the body must neither keep nor change them."""
        return self._buffers.rooted_at(self._node)

    def rows(self, name: str, rows: Tensor) -> Tensor:
        """Copy the dim-0 rows i64[n] of a buffer out of this version, in the order given."""
        with self._buffers.rooted_at(self._node):
            self._buffers.check(name, rows)
            return self._buffers.copy_rows(name, rows).view(self.spec(name)[1])

    def exclusive(self) -> AbstractContextManager[object]:
        """Keep other threads out of the buffers for a whole ``with`` body; the own thread may go on using them."""
        return self._buffers.lock

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the buffers."""
        return tuple(self._buffers.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the live buffers, however many versions share them."""
        return sum(tensor.nbytes for tensor in self._buffers.tensors.values())

    def spec(self, name: str) -> tuple[torch.Size, torch.dtype, torch.device]:
        """Tell shape, dtype and device of a buffer, without lock or re-rooting."""
        tensor = self._buffers.find(name)
        return tensor.shape, tensor.dtype, tensor.device

    def saved_bytes(self) -> int:
        """Count the bytes that the differences of all versions hold, row numbers included, without re-rooting."""
        with self._buffers.lock:
            total, nodes = 0, [self._buffers.root]
            while nodes:
                node = nodes.pop()
                total += sum(saved.nbytes for saved in node.link[1].values()) if node.link else 0
                nodes.extend(node.live_children())
        return total

    def __repr__(self) -> str:
        return f"Handle({', '.join(self.names)})"

    def __copy__(self) -> Handle:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Handle:
        return create_handle(self._clones())

    def __reduce__(self) -> tuple[Callable[..., Handle], tuple[dict[str, tuple[Tensor, torch.dtype]]]]:
        return _from_bits, ({name: (_bits(tensor), tensor.dtype) for name, tensor in self._clones().items()},)

    def _clones(self) -> dict[str, Tensor]:
        with self.read() as tensors, torch.inference_mode(False):
            return {name: tensor.clone() for name, tensor in tensors.items()}


def _bits(tensor: Tensor) -> Tensor:
    """View a tensor as integers: torch neither copies by index nor pickles float8 and unsigned 16 and 32 bits."""
    return tensor.view(_INTEGERS.get(tensor.itemsize, tensor.dtype))


def _from_bits(tensors: Mapping[str, tuple[Tensor, torch.dtype]]) -> Handle:
    return create_handle({name: bits.view(dtype) for name, (bits, dtype) in tensors.items()})


class Write:
    """What a write lends to its body: the live buffers, and after a clean exit the new version."""

    __slots__ = ("_handle", "tensors")

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._handle: Handle | None = None

    @property
    def handle(self) -> Handle:
        """The new version."""
        if self._handle is None:
            message = "Write.handle: expected a write that has ended, got one that is running or was rolled back"
            raise StateBusyError(f"{message}; ask after the with block")
        return self._handle


class _Watch(weakref.ref[Any]):
    """A weak reference whose death asks the next write to look at ``node`` again."""

    __slots__ = ("node",)
    node: weakref.ref[_Node]


class _Node:
    """A version: the root if ``link`` is None, else a difference to the version that ``link`` leads to.

    ``children`` lists every version whose link leads here, and some whose link turned round: the links decide.
    """

    __slots__ = ("__weakref__", "children", "holder", "link")

    def __init__(self) -> None:
        self.link: tuple[_Node, dict[str, _SavedRows]] | None = None
        self.children: set[_Watch] = set()
        self.holder: _Watch | None = None

    def is_held(self) -> bool:
        """Tell whether a handle of this version is alive."""
        return self.holder is not None and self.holder() is not None

    def live_children(self) -> Iterator[_Node]:
        """Give the versions whose links lead here."""
        for watch in self.children:
            child: _Node | None = watch()
            if child is not None and child.link is not None and child.link[0] is self:
                yield child

    def heir(self) -> _Node | None:
        """Give the version that this one can be merged into: its only child, if this one is neither held nor root."""
        if self.link is None or self.is_held():
            return None
        children = self.live_children()
        only = next(children, None)
        return only if next(children, None) is None else None


class _SavedRows:
    """What some rows of one buffer held, as chunks of (row numbers i64[n], their content).

    A row may be listed twice only with the same content, so the order of chunks means nothing. Chunks are disjoint and
    shrink by half or more from first to last once something was merged in: appending costs amortised O(log) copies.
    """

    __slots__ = ("chunks", "listed")

    def __init__(self, chunks: list[tuple[Tensor, Tensor]]) -> None:
        self.chunks = chunks
        self.listed: set[int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of row numbers and content."""
        return sum(numbers.nbytes + content.nbytes for numbers, content in self.chunks)

    def add_missing(self, other: _SavedRows) -> None:
        """Take over those rows of ``other`` that are not listed here yet."""
        if self.listed is None:
            distinct = _SavedRows([])
            distinct.listed = set()
            distinct.add_missing(self)
            self.chunks, listed = distinct.chunks, distinct.listed
        else:
            listed = self.listed
        self.listed = None  # cut off below, it would not match the chunks; it is then built anew from them
        for numbers, content in other.chunks:
            missing = {row: i for i, row in enumerate(numbers.tolist()) if row not in listed}
            if not missing:
                continue
            if len(missing) < len(numbers):
                picks = torch.tensor(list(missing.values()))
                numbers, content = (part.index_select(0, picks.to(part.device)) for part in (numbers, content))
            self.chunks.append((numbers, content))
            listed.update(missing)
            while len(self.chunks) > 1 and len(self.chunks[-2][0]) < 2 * len(self.chunks[-1][0]):
                (one, first), (two, second) = self.chunks[-2:]
                self.chunks[-2:] = [(torch.cat((one, two.to(one.device))), torch.cat((first, second)))]
        self.listed = listed


class _Intent(NamedTuple):
    """Where the buffers shall go: write ``rows``, then ``root`` is the root.

    ``left`` is the version left behind, with the rows that lead back to it; None when the root stays.
    """

    root: _Node
    rows: dict[str, _SavedRows]
    left: tuple[_Node, dict[str, _SavedRows]] | None = None


class _Buffers:
    """The mutable side: live buffers, the root, two locks, and the intent that is being carried out.

    ``busy`` is held while a body runs. Both locks are taken by ``with`` alone, which an interrupt cannot split.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = MappingProxyType(tensors)
        with torch.inference_mode(False):  # a view made inside it could not be written outside it
            self.bits = {name: _bits(tensor) for name, tensor in tensors.items()}
        self.lock = RLock()
        self.busy = Lock()
        self.root = _Node()
        self.intent: _Intent | None = None
        self.dropped: deque[_Watch] = deque()

    def handle_of(self, node: _Node) -> Handle:
        """Make the one handle that holds a new node."""
        handle = Handle(self, node)
        node.holder = self._watch(handle, node)
        return handle

    def _watch(self, target: Handle | _Node, node: _Node) -> _Watch:
        watch = _Watch(target, self.dropped.append)
        watch.node = weakref.ref(node)
        hash(watch)  # the reference remembers it, and so can leave a set after its target's death
        return watch

    @contextmanager
    def rooted_at(self, node: _Node) -> Iterator[Mapping[str, Tensor]]:
        """Hold the locks while ``node`` is the root, and lend the buffers."""
        # Entering no_grad costs more than asking for it, and steps are inside it already.
        with self.lock, torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            if self.busy.locked():
                message = "Handle: expected buffers at rest, got a call from inside a write or read of the same buffers"
                raise StateBusyError(f"{message}; read what is needed before that body, or deepcopy the handle there")
            with self.busy:
                self.finish()
                self._reroot(node)
                yield self.tensors

    def finish(self) -> None:
        """Carry out the intent, if there is one; cut off anywhere and repeated, it comes to the same."""
        if self.intent is None:
            return
        root, rows, left = self.intent
        for name, saved in rows.items():
            bits = self.bits[name]
            for numbers, content in saved.chunks:
                bits.index_copy_(0, numbers.to(bits.device, non_blocking=True), content)
        root.link = None
        self.root = root
        if left is not None:
            node, way_back = left
            root.children.add(self._watch(node, root))
            node.link = (root, way_back)
        self.intent = None

    def _reroot(self, node: _Node) -> None:
        """Make ``node`` the root, turning round one arrow after the other, from the old root on."""
        path = []
        while node.link is not None:
            path.append((node, node.link))
            node = node.link[0]
        for target, (left, saved) in reversed(path):
            displaced = {
                name: _SavedRows([(numbers, self.copy_rows(name, numbers)) for numbers, _ in rows.chunks])
                for name, rows in saved.items()
            }
            self.intent = _Intent(target, saved, (left, displaced))
            self.finish()

    def merge_dropped(self) -> None:
        """Look at every version whose holder or child has gone since the last write, and merge what can be merged.

        Called when the root is held, so that every version that it skips is looked at again when that one is dropped.
        """
        while self.dropped:
            watch = self.dropped[0]  # stays in the queue until it is dealt with, lest an interrupt lose it
            node = watch.node()
            if node is not None:
                node.children.discard(watch)
                self._merge(node)
            self.dropped.popleft()

    def _merge(self, node: _Node) -> None:
        """Merge the run of needless versions that ``node`` is in, if it is in one, into the one at its far end."""
        heir, child = None, node.heir()
        while child is not None:  # the far end first, so that each version's rows move once
            heir, child = child, child.heir()
        while heir and heir.link and (node := heir.link[0]).link and node.heir() is heir:
            own, (onward, inherited) = heir.link[1], node.link
            for name, saved in inherited.items():
                own.setdefault(name, _SavedRows([])).add_missing(saved)
            onward.children.add(self._watch(heir, onward))
            heir.link = (onward, own)
            onward.children.discard(weakref.ref(node))

    def save(self, rows: Mapping[str, Tensor]) -> dict[str, _SavedRows]:
        """Copy what the rows hold now; their numbers too, since the caller may reuse that tensor."""
        for name, numbers in rows.items():
            self.check(name, numbers)
        return {name: _SavedRows([(rows_of.clone(), self.copy_rows(name, rows_of))]) for name, rows_of in rows.items()}

    def copy_rows(self, name: str, numbers: Tensor) -> Tensor:
        """Copy rows of one buffer, as integers."""
        bits = self.bits[name]
        try:
            return bits.index_select(0, numbers.to(bits.device, non_blocking=True))
        except IndexError as error:
            where = f"Handle: rows of {name}: expected 0 <= row < {len(bits)}"
            raise ShapeError(f"{where}, got {numbers.tolist()}; look at the index", field=name, got=numbers) from error

    def check(self, name: str, numbers: Tensor) -> None:
        """Refuse what cannot be row numbers of a buffer."""
        self.find(name)
        if not isinstance(numbers, Tensor) or numbers.dtype is not torch.int64:
            got = getattr(numbers, "dtype", type(numbers).__name__)
            raise DtypeError(f"Handle: rows of {name}: expected i64[n], got {got}; convert it", field=name, got=got)
        if numbers.dim() != 1:
            got = tuple(numbers.shape)
            raise ShapeError(f"Handle: rows of {name}: expected i64[n], got {got}; flatten it", field=name, got=got)

    def find(self, name: str) -> Tensor:
        """Give a buffer by name."""
        if name not in self.tensors:
            message = f"Handle: expected one of {', '.join(self.tensors)}, got {name!r}; see Handle.names"
            raise ShapeError(message, field=name, got=name)
        return self.tensors[name]
