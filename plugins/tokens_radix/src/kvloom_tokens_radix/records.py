"""The format of a journal's file: changes of a tree as checksummed records, and their replay.

`MAGIC`, then records: `<uint32 bytes of payload><8 bytes of BLAKE2b over that and the payload><payload>`, a payload
being one change behind another. Integers are little-endian.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from kvloom_tokens_radix.tree import Change, Cut, Forget, Leaf, Node, Root, Split, Tree

MAGIC = b"kvloom radix 1\n\0"
"""The first bytes of the file; they name its format."""

_HEAD = struct.Struct("<I8s")
_ROOT = struct.Struct("<cQI")
_SPLIT = struct.Struct("<cQQI")
_CUT = struct.Struct("<cQII")
_LEAF = struct.Struct("<cQQII")
_FORGET = struct.Struct("<cQ")
_SLACK_NODES = 256
_SLACK_BYTES = 64 << 10


class DamagedError(ValueError):
    """The file's content was damaged."""


def record(changes: Iterable[Change], *, before: bytes = b"") -> bytes:
    """The bytes of one record, with `before` before its first change."""
    payload = before + b"".join(map(_packed, changes))
    return _HEAD.pack(len(payload), _checksum(payload)) + payload


def snapshot(nodes: Iterable[Node]) -> Iterator[Change]:
    """The changes that make these nodes, parents before their children."""
    for node in nodes:
        if node.parent is None:
            yield Root(node.id, node.salt)
        else:
            yield Leaf(node.id, node.parent.id, node.ends.tobytes(), node.starts.tobytes(), node.edge)


def payloads(file: BinaryIO, *, most_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Each record's payload and its end in the file. An incomplete record is the last.

    most_bytes: maximum size of one record. Raises DamagedError at the first damaged one.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise DamagedError("not a journal")
    end = len(MAGIC)
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        length, checksum = _HEAD.unpack(head)
        if length > most_bytes:
            raise DamagedError(f"a record of {length} bytes")
        payload = file.read(length)
        if len(payload) < length:
            return
        if _checksum(payload) != checksum:
            raise DamagedError("a record whose checksum is wrong")
        end += _HEAD.size + length
        yield payload, end


class Replay:
    """Does changes again. One that makes no sense in this tree, because it knows less, is left out."""

    def __init__(self, tree: Tree, *, go_on: Callable[[], bool] = lambda: True) -> None:
        """go_on: asked after each change; once it says no, DamagedError is raised."""
        self._tree = tree
        self._go_on = go_on
        self._nodes: dict[int, Node] = {}

    def apply(self, payload: bytes, *, oldest_last: bool = False) -> None:
        """Raises DamagedError if it is not a payload. oldest_last: each new node was used before those there are."""
        try:
            for change in _unpacked(payload):
                if oldest_last and not isinstance(change, Root | Leaf):
                    raise DamagedError("a change of what was there before")
                self._apply(change, oldest_last)
                self._look(2 * self._tree.memory_bytes + _SLACK_BYTES)  # each: one may be of any size
        except (struct.error, IndexError, UnicodeError) as error:
            raise DamagedError("a record that is none") from error
        self._look(self._tree.memory_bytes)

    def _look(self, most_bytes: int) -> None:
        """Stay within memory and time. Within a record the tree may be larger for a moment, because learning reports
        last what it has forgotten."""
        if self._tree.nbytes > most_bytes:
            self._tree.shrink()
        if len(self._nodes) > 2 * len(self._tree) + _SLACK_NODES:
            self._nodes = {id: node for id, node in self._nodes.items() if node in self._tree}
        if not self._go_on():
            raise DamagedError("what takes too long to read")

    def _apply(self, change: Change, oldest_last: bool) -> None:
        try:
            node = self._change(change)
        except (KeyError, ValueError):
            return
        if node is not None and node in self._tree:
            if oldest_last:
                self._tree.make_oldest(node)
            else:
                self._tree.use(node)

    def _change(self, change: Change) -> Node | None:
        tree, nodes = self._tree, self._nodes
        match change:
            case Root(id, salt):
                node = nodes[id] = tree.add_root(id, salt)
            case Leaf(id, parent, ends, starts, edge):
                node = nodes[id] = tree.add_leaf(id, self._living(parent), edge, _ints(ends), _ints(starts))
            case Split(lower, upper, num_tokens):
                node = nodes[upper] = tree.split(self._living(lower), num_tokens, upper)
            case Cut(id, start, end):
                node = self._living(id)
                tree.add_cut(node, start, end)
            case Forget(id):
                tree.forget(self._living(id))
                del nodes[id]
                return None
        return node

    def _living(self, id: int) -> Node:
        node = self._nodes[id]
        if node not in self._tree:
            raise KeyError(id)
        return node


def _checksum(payload: bytes) -> bytes:
    return hashlib.blake2b(len(payload).to_bytes(4, "little") + payload, digest_size=8).digest()


def _packed(change: Change) -> bytes:
    match change:
        case Root(id, salt):
            text = salt.encode(errors="surrogatepass")
            return _ROOT.pack(b"R", id, len(text)) + text
        case Split(lower, upper, num_tokens):
            return _SPLIT.pack(b"S", lower, upper, num_tokens)
        case Cut(id, start, end):
            return _CUT.pack(b"C", id, start, end)
        case Leaf(id, parent, ends, starts, edge):
            head = _LEAF.pack(b"L", id, parent, len(ends) // 4, len(edge) // 4)
            return b"".join((head, _ints(ends, swapped=True).tobytes(), _ints(starts, swapped=True).tobytes(), edge))
        case Forget(id):
            return _FORGET.pack(b"F", id)


def _unpacked(payload: bytes) -> Iterator[Change]:
    at = 0

    def take(count: int) -> bytes:
        nonlocal at
        at += count
        if at > len(payload):
            raise IndexError("a change that is longer than its record")
        return payload[at - count : at]

    def fields(layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(take(layout.size))[1:]

    kinds: dict[bytes, Callable[[], Change]] = {
        b"S": lambda: Split(*fields(_SPLIT)),
        b"C": lambda: Cut(*fields(_CUT)),
        b"F": lambda: Forget(*fields(_FORGET)),
    }
    while at < len(payload):
        kind = payload[at : at + 1]
        if kind == b"R":
            id, length = fields(_ROOT)
            yield Root(id, take(length).decode(errors="surrogatepass"))
        elif kind == b"L":
            id, parent, cuts, tokens = fields(_LEAF)
            ends, starts = (_ints(take(4 * cuts), swapped=True).tobytes() for _ in range(2))
            yield Leaf(id, parent, ends, starts, take(4 * tokens))
        elif kind in kinds:
            yield kinds[kind]()
        else:
            raise IndexError("an unknown kind of change")


def _ints(data: bytes, *, swapped: bool = False) -> array[int]:
    """swapped: from or to the file's order."""
    values = array("i", data)
    if swapped and sys.byteorder == "big":
        values.byteswap()
    return values
