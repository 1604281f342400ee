"""Known sequences that were stored: their tokens, as a radix tree, and their cuts.

A node stands for a run of tokens behind its parent's. Beside the tokens it has the segments that end in it. Every
segment that the tree has begins where another one ends, or at 0, and no two end at the same place: so the deepest end
on a sequence's path leads back to 0 in one way, and that is how the sequence is cut. See `docs/design`.

Not thread-safe: the database holds its lock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from kvloom_tokens_radix.cutting import Rules, planned

NODE_BYTES = 900
"""Approximate memory of a node beside its tokens and cuts: objects, its place in its parent and in the order of use."""
CUT_BYTES = 10
_MOST_ID = 1 << 62


class Node:
    """Tokens `start` to `end` of every sequence that passes through it."""

    __slots__ = ("children", "edge", "end", "ends", "id", "parent", "salt", "start", "starts")

    def __init__(self, id: int, parent: Node | None, edge: bytes, salt: str = "") -> None:
        self.id = id
        self.parent = parent
        self.salt = salt
        """The salt of a root."""
        self.edge = edge
        self.start = 0 if parent is None else parent.end
        self.end = self.start + len(edge) // 4
        self.children: dict[int, Node] | None = None
        """By first token."""
        self.ends = array("i")
        """Ends of the segments that end in it, ascending."""
        self.starts = array("i")
        """Starts of those segments, which may be in a node above."""

    @property
    def nbytes(self) -> int:
        return NODE_BYTES + len(self.edge) + CUT_BYTES * len(self.ends) + 4 * len(self.salt)

    def add_cut(self, start: int, end: int) -> None:
        place = bisect_left(self.ends, end)
        self.ends.insert(place, end)
        self.starts.insert(place, start)

    def first_token(self) -> int:
        return int.from_bytes(self.edge[:4], "little", signed=True)


class Root(NamedTuple):
    """A change: a salt's tree begins."""

    id: int
    salt: str


class Split(NamedTuple):
    """A change: the first tokens of a node become a node above it."""

    lower: int
    upper: int
    num_tokens: int


class Cut(NamedTuple):
    """A change: a segment ends in a node."""

    id: int
    start: int
    end: int


class Leaf(NamedTuple):
    """A change: a node below another."""

    id: int
    parent: int
    ends: bytes
    starts: bytes
    edge: bytes


class Forget(NamedTuple):
    """A change: a node without any below it goes."""

    id: int


Change = Root | Split | Cut | Leaf | Forget


class Place(NamedTuple):
    """The known part of a sequence."""

    path: list[Node]
    """Nodes all of whose tokens it has, from the root."""
    inside: Node | None
    """The next one, if it has some of its tokens."""
    shared: int
    """Leading tokens that are known."""


class Tree:
    """All salts of one fingerprint. Takes `memory_bytes` at most: the least recently used are forgotten."""

    def __init__(self, rules: Rules, memory_bytes: int) -> None:
        self.rules = rules
        self.nbytes = 0
        self.memory_bytes = memory_bytes
        self._most_tokens = memory_bytes // 8 // rules.chunk_tokens * rules.chunk_tokens
        self._roots: dict[str, Node] = {}
        # Whenever a node is used, its parents are moved behind it: the first one is always a leaf.
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, node: Node) -> bool:
        return node in self._order

    def clear(self) -> None:
        """Know nothing."""
        self._roots.clear()
        self._order.clear()
        self.nbytes = 0

    def nodes(self) -> list[Node]:
        """The most recently used first, parents before their children."""
        return list(reversed(self._order))

    # -- asking --------------------------------------------------------------------------------------------------------

    def cut(self, salt: str, data: bytes) -> list[int]:
        """The ends of the segments of a sequence, int32-LE tokens. Changes nothing."""
        place = self._place(salt, data)
        known = _traced(place)
        reach = known[-1] if known else 0
        return known + planned(self.rules, reach=reach, shared=place.shared, total=len(data) // 4)

    def _place(self, salt: str, data: bytes) -> Place:
        node = self._roots.get(salt)
        if node is None:
            return Place([], None, 0)
        total, at, path = len(data) // 4, 0, [node]
        while at < total and node.children is not None:
            child = node.children.get(int.from_bytes(data[4 * at : 4 * at + 4], "little", signed=True))
            if child is None:
                break
            if data[4 * at : 4 * child.end] != child.edge:
                return Place(path, child, at + _common_tokens(data, at, child.edge))
            node, at = child, child.end
            path.append(node)
        return Place(path, None, at)

    # -- learning ------------------------------------------------------------------------------------------------------

    def learn(self, salt: str, data: bytes) -> list[Change]:
        """Know a sequence and its cuts from now on; what that changed, in order."""
        changes: list[Change] = []
        data = data[: 4 * self._most_tokens]
        place = self._place(salt, data)
        known = _traced(place)
        reach = known[-1] if known else 0
        more = planned(self.rules, reach=reach, shared=place.shared, total=len(data) // 4)
        spans = list(zip([reach, *more], more, strict=False))
        path, shared = place.path, place.shared
        if not path:
            if not more:
                return changes
            root = self._root(salt, changes)
            path.append(root)
        if more and more[-1] > shared:
            if place.inside is not None:
                path.append(self._split(place.inside, shared, changes))
            self._cut_all(path, [span for span in spans if span[1] <= shared], changes)
            path.append(self._leaf(path[-1], data[4 * shared : 4 * more[-1]], spans, changes))
        else:
            if place.inside is not None:
                path.append(place.inside)
            self._cut_all(path, spans, changes)
        for node in reversed(path):
            self._order.move_to_end(node)
        changes.extend(self.shrink())
        return changes

    def shrink(self) -> list[Change]:
        """Forget until the rest fits."""
        changes: list[Change] = []
        while self.nbytes > self.memory_bytes:
            node = next(iter(self._order))
            while node.children:  # as a journal may have it that was not written by a tree
                node = next(iter(node.children.values()))
            self.forget(node)
            changes.append(Forget(node.id))
        return changes

    def _root(self, salt: str, changes: list[Change]) -> Node:
        node = self.add_root(self._new_id(), salt)
        changes.append(Root(node.id, salt))
        return node

    def _split(self, lower: Node, at: int, changes: list[Change]) -> Node:
        upper = self.split(lower, at - lower.start, self._new_id())
        changes.append(Split(lower.id, upper.id, upper.end - upper.start))
        return upper

    def _cut_all(self, path: list[Node], spans: list[tuple[int, int]], changes: list[Change]) -> None:
        for start, end in spans:
            node = next(node for node in reversed(path) if node.start < end)
            self.add_cut(node, start, end)
            changes.append(Cut(node.id, start, end))

    def _leaf(self, parent: Node, edge: bytes, spans: list[tuple[int, int]], changes: list[Change]) -> Node:
        mine = [span for span in spans if span[1] > parent.end]
        starts, ends = (array("i", column) for column in zip(*mine, strict=True))
        node = self.add_leaf(self._new_id(), parent, edge, ends, starts)
        changes.append(Leaf(node.id, parent.id, ends.tobytes(), starts.tobytes(), edge))
        return node

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    # -- one node: also what a journal does again ----------------------------------------------------------------------

    def add_root(self, id: int, salt: str) -> Node:
        """Raises ValueError if the salt has one."""
        _check_id(id)
        if salt in self._roots:
            raise ValueError("a second root")
        node = self._roots[salt] = Node(id, None, b"", salt)
        self._enter(node)
        return node

    def add_leaf(self, id: int, parent: Node, edge: bytes, ends: array[int], starts: array[int]) -> Node:
        """Raises ValueError if it is no node, or the parent has one that begins like it."""
        _check_id(id)
        node = Node(id, parent, edge)
        spans = zip(starts, ends, [parent.end, *ends], strict=False)
        if not edge or len(edge) % 4 or not all(0 <= start < end > last for start, end, last in spans):
            raise ValueError("not a node")
        fit = len(starts) == len(ends) and all(map(self.rules.allow, starts, ends))
        if not fit or (ends and ends[-1] > node.end):
            raise ValueError("cuts that are not a node's")
        if parent.children is None:
            parent.children = {}
        if parent.children.setdefault(node.first_token(), node) is not node:
            raise ValueError("two nodes that begin alike")
        node.ends, node.starts = ends, starts
        self._enter(node)
        return node

    def split(self, lower: Node, num_tokens: int, id: int) -> Node:
        """The first `num_tokens` of a node as a new one above it. Raises ValueError if it has not more than that."""
        _check_id(id)
        parent = lower.parent
        if parent is None or not 0 < num_tokens < lower.end - lower.start:
            raise ValueError("not a place to split at")
        assert parent.children is not None
        self.nbytes -= lower.nbytes
        upper = Node(id, parent, lower.edge[: 4 * num_tokens])
        parent.children[upper.first_token()] = upper
        lower.parent, lower.start, lower.edge = upper, upper.end, lower.edge[4 * num_tokens :]
        upper.children = {lower.first_token(): lower}
        count = bisect_right(lower.ends, upper.end)
        upper.ends, lower.ends = lower.ends[:count], lower.ends[count:]
        upper.starts, lower.starts = lower.starts[:count], lower.starts[count:]
        self.nbytes += lower.nbytes
        self._enter(upper)
        return upper

    def add_cut(self, node: Node, start: int, end: int) -> None:
        """Raises ValueError if no segment can end there."""
        inside = 0 <= start < end and node.start < end <= node.end
        place = bisect_left(node.ends, end)
        if not inside or not self.rules.allow(start, end) or end in node.ends[place : place + 1]:
            raise ValueError("not a cut of this node")
        node.add_cut(start, end)
        self.nbytes += CUT_BYTES

    def forget(self, node: Node) -> None:
        """Raises ValueError if there are nodes below it."""
        if node.children:
            raise ValueError("a node with nodes below it")
        del self._order[node]
        self.nbytes -= node.nbytes
        if node.parent is None:
            del self._roots[node.salt]
        else:
            assert node.parent.children is not None
            del node.parent.children[node.first_token()]
            node.parent.children = node.parent.children or None

    def use(self, node: Node | None) -> None:
        """Mark a node and all nodes above it as used now."""
        while node is not None:
            self._order.move_to_end(node)
            node = node.parent

    def make_oldest(self, node: Node) -> None:
        self._order.move_to_end(node, last=False)

    def _enter(self, node: Node) -> None:
        self._order[node] = None
        self.nbytes += node.nbytes
        self._next_id = max(self._next_id, node.id + 1)


def _check_id(id: int) -> None:
    """Raise ValueError if it leaves no room for others in a journal's fields."""
    if not 0 < id < _MOST_ID:
        raise ValueError("not the number of a node")


def _traced(place: Place) -> list[int]:
    """The ends of the known segments of a sequence, ascending: from the deepest back to 0."""
    ends, starts = array("i"), array("i")
    for node in place.path:
        ends.extend(node.ends)
        starts.extend(node.starts)
    if place.inside is not None:
        count = bisect_right(place.inside.ends, place.shared)
        ends.extend(place.inside.ends[:count])
        starts.extend(place.inside.starts[:count])
    if not ends or (starts[0] == 0 and ends[:-1] == starts[1:]):
        return ends.tolist()
    return _walked(ends.tolist(), starts.tolist())


def _walked(ends: list[int], starts: list[int]) -> list[int]:
    traced: list[int] = []
    wanted = ends[-1]
    for end, start in zip(reversed(ends), reversed(starts), strict=True):
        if end == wanted:
            traced.append(end)
            wanted = start
    traced.reverse()
    return traced if wanted == 0 else []


def _common_tokens(data: bytes, at: int, edge: bytes) -> int:
    """Leading tokens of `edge` that `data` has from token `at` on."""
    count = min(len(data) - 4 * at, len(edge)) // 4
    different = np.frombuffer(data, "<i4", count, 4 * at) != np.frombuffer(edge, "<i4", count)
    first = int(different.argmax())
    return first if different[first] else count
