"""A decoder written from docs/design/kvz.md alone, slow and plain: what the document leaves out, it would not know."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvloom_serde_cachegen.profile import Profile

_TABLES = (Path(__file__).parents[1] / "csrc" / "tables.h").read_text()
_FREQUENCIES = _TABLES[_TABLES.index("kFrequencies") : _TABLES.index("kCosts")]
FAMILY = np.array([int(each) for each in re.findall(r"\b\d+(?=,)", _FREQUENCIES)]).reshape(64, 64)
STEPS = np.array([2.0 ** ((code - 160) / 8) for code in range(256)], dtype=np.float32)
ESCAPE = 62
BITS = {1: 16, 2: 16, 3: 32, 4: 8, 5: 8, 6: 8}


@dataclass
class Decoded:
    """`[planes, tokens, elements]` each."""

    values: np.ndarray
    """float32, where `exact` is not."""
    bits: np.ndarray
    """uint32, where the original bits came back."""
    exact: np.ndarray
    steps: np.ndarray
    """Steps of the quantiser; nan where there is none."""
    transformed: np.ndarray
    """Mask of the values that are sums of components."""


class Lanes:
    """The states, and the words that are left."""

    def __init__(self, states: tuple[int, ...], words: bytes, precision: int) -> None:
        self.states, self.words, self.precision = (
            list(states),
            list(struct.unpack(f"<{len(words) // 2}H", words)),
            precision,
        )
        self.at = 0

    def row(self, tables: list[np.ndarray]) -> list[int]:
        mask, symbols = (1 << self.precision) - 1, []
        for lane, table in enumerate(tables):
            slot, before = self.states[lane] & mask, 0
            symbol, frequency = 0, int(table[0])
            while slot >= before + frequency:
                before, symbol = before + frequency, symbol + 1
                frequency = int(table[symbol])
            self.states[lane] = frequency * (self.states[lane] >> self.precision) + slot - before
            symbols.append(symbol)
        for lane in range(len(tables)):
            if self.states[lane] < 1 << 16:
                self.states[lane] = self.states[lane] << 16 | self.word()
        return symbols

    def word(self) -> int:
        self.at += 1
        return self.words[self.at - 1]

    def end(self) -> None:
        assert all(state == 1 << 16 for state in self.states)
        assert len(self.words) - self.at <= 1 and not any(self.words[self.at :])


def decode(stream: bytes, profile: Profile | None = None) -> Decoded:
    magic, version, mode, dtype, planes, tokens, hidden, band, tile_tokens, tiles, table_bytes, total = (
        struct.unpack_from("<4sBBBBIIHHIII", stream)
    )
    assert magic == b"KVZ1" and version == 1 and total == len(stream)
    tables = stream[32 : 32 + table_bytes]
    directory = struct.unpack_from(f"<{tiles}I", stream, 32 + table_bytes)
    payload = stream[32 + table_bytes + 4 * tiles :]
    ends = [0, *(4 * (entry & 0x1FFFFFFF) for entry in directory)]
    kept = [(entry >> 29, payload[start:end]) for entry, start, end in zip(directory, ends, ends[1:], strict=False)]
    shape = (planes, tokens, hidden)
    out = Decoded(
        np.zeros(shape, np.float32), np.zeros(shape, np.uint32), np.zeros(shape, bool), np.full(shape, np.nan),
        np.zeros(shape, bool),
    )  # fmt: skip
    if mode == 2:
        own = _own_tables(tables, planes)
        runs = math.ceil(tokens * hidden / 32768)
        for number, (kind, tile) in enumerate(kept):
            plane, start = number // runs, number % runs * 32768
            count = min(32768, tokens * hidden - start)
            view = [each[plane].reshape(-1)[start : start + count].reshape(1, -1) for each in (out.bits, out.exact)]
            if kind == 5:
                view[0][:] = _symbols(tile, count, own[plane], dtype)
                view[1][:] = True
            else:
                _plain(kind, tile, dtype, *view)
        return out
    numbers = iter(kept)
    if mode == 4:
        assert profile is not None and tables[:16] == profile.id
        (start,) = struct.unpack_from("<i", tables, 16)
        heads = struct.iter_unpack("<HH", tables[20:])
    for plane in range(planes):
        for token in range(0, tokens, tile_tokens):
            if mode == 4:
                used, code = next(heads)
                if code:
                    rows = slice(token, min(token + tile_tokens, tokens))
                    tiles_of_block = [next(numbers) for _ in range(0, hidden, band)]
                    out.values[plane, rows] = _transformed(tiles_of_block, profile, plane, start + token, used, code,
                                                           band, rows.stop - rows.start)  # fmt: skip
                    out.transformed[plane, rows] = True
                    continue
            for channel in range(0, hidden, band):
                part = np.s_[plane, token : min(token + tile_tokens, tokens), channel : min(channel + band, hidden)]
                kind, tile = next(numbers)
                if kind < 2:
                    _plain(kind, tile, dtype, out.bits[part], out.exact[part])
                else:
                    scales = _scales(tables, planes, tokens, dtype, plane)[part[1]] if mode == 3 else None
                    half = struct.unpack_from("<H", tables, 2 * plane)[0] // 2 - 1 if mode == 3 else 0
                    _tile(kind, tile, dtype, scales, half, out, part)
    return out


def _own_tables(tables: bytes, planes: int) -> list[np.ndarray]:
    found, at = [], 0
    for _ in range(planes):
        first, last = tables[at], tables[at + 1]
        at += 2
        table = np.zeros(256, int)
        for symbol in range(first, last + 1):
            value = tables[at]
            at += 1
            if value & 0x80:
                value = (value & 0x7F) << 8 | tables[at]
                at += 1
            table[symbol] = value
        assert table.sum() == 4096
        found.append(table)
    return found


def _scales(tables: bytes, planes: int, tokens: int, dtype: int, plane: int) -> np.ndarray:
    width = BITS[dtype] // 8
    start = (2 * planes + 3) // 4 * 4 + plane * tokens * width
    bits = np.frombuffer(tables[start : start + tokens * width], f"<u{width}")
    return as_values(bits, dtype)


def as_values(bits: np.ndarray, dtype: int) -> np.ndarray:
    import torch

    types = {1: torch.bfloat16, 2: torch.float16, 3: torch.float32, 4: torch.float8_e4m3fn, 5: torch.float8_e5m2}
    return torch.from_numpy(bits.copy().view(np.uint8)).view(types[dtype]).float().numpy()


def _plain(kind: int, tile: bytes, dtype: int, bits: np.ndarray, exact: np.ndarray) -> None:
    width = BITS[dtype] // 8
    elements = np.frombuffer(tile[: width * (bits.size if kind == 0 else 1)], f"<u{width}")
    bits[:] = elements.reshape(bits.shape) if kind == 0 else elements[0]
    exact[:] = True


def _symbols(tile: bytes, count: int, table: np.ndarray, dtype: int) -> np.ndarray:
    states, rest_bytes = min(count, 32), {1: 1, 2: 1, 3: 3, 6: 0}[dtype]
    rest = tile[4 * states : 4 * states + rest_bytes * count]
    words = tile[4 * states + (rest_bytes * count + 3) // 4 * 4 :]
    lanes = Lanes(struct.unpack_from(f"<{states}I", tile), words, 12)
    found = []
    for start in range(0, count, 32):
        found += lanes.row([table] * min(32, count - start))
    lanes.end()
    symbols = np.array(found, dtype=np.uint32)
    if dtype == 6:
        return symbols
    parts = np.frombuffer(rest, np.uint8).reshape(count, rest_bytes).astype(np.uint32)
    if dtype == 2:
        return symbols << 8 | parts[:, 0]
    top = parts[:, -1]
    low = parts[:, 0] | parts[:, 1] << 8 if dtype == 3 else np.zeros(count, np.uint32)
    shift = 16 if dtype == 3 else 0
    return (top & 0x80) << 8 + shift | symbols << 7 + shift | (top & 0x7F) << shift | low


def _tile(
    kind: int,
    tile: bytes,
    dtype: int,
    scales: np.ndarray | None,
    half: int,
    out: Decoded,
    part: tuple[int, slice, slice],
) -> None:
    rows, width = out.values[part].shape
    states, count = min(width, 32), {2: width, 3: 1, 4: 0}[kind]
    at = 4 * states
    codes = np.frombuffer(tile[at : at + count], np.uint8)
    at += count
    centres = np.zeros(width, np.float32)
    if kind != 4:
        centres = np.frombuffer(tile[at : at + width], np.int8).astype(np.float32)
        at += width
    chosen = tile[at : at + width]
    side = at + width
    side += side % 2
    lanes = Lanes(struct.unpack_from(f"<{states}I", tile), tile[side:], 10)
    steps = np.ones(width, np.float32) if kind == 4 else STEPS[codes] if kind == 2 else np.repeat(STEPS[codes], width)
    for row in range(rows):
        for start in range(0, width, 32):
            columns = range(start, min(start + 32, width))
            for column, symbol in zip(columns, lanes.row([FAMILY[chosen[c]] for c in columns]), strict=True):
                level = np.float32(symbol - 31) + centres[column]
                spot = (part[0], part[1].start + row, part[2].start + column)
                if scales is None:
                    out.values[spot] = level * steps[column]
                else:
                    out.values[spot] = level / np.float32(half) * scales[row]
                out.steps[spot] = steps[column] if scales is None else np.nan
                out.exact[spot] = symbol == ESCAPE
            for column in columns:
                spot = (part[0], part[1].start + row, part[2].start + column)
                if out.exact[spot]:
                    out.bits[spot] = lanes.word() | (lanes.word() << 16 if dtype == 3 else 0)
    lanes.end()


def _transformed(
    tiles: list[tuple[int, bytes]], profile: Profile, plane: int, start: int, used: int, code: int, band: int, rows: int
) -> np.ndarray:
    """Decode the only layer's components."""
    assert profile.transform is not None
    q = np.zeros((rows, used), np.int64)
    for number, (kind, tile) in enumerate(tiles):
        width = max(min(band, used - number * band), 0)
        assert kind == 6 and (width > 0 or not tile)
        if width:
            q[:, number * band : number * band + width] = _coefficients(tile, rows, width)
    exponents = profile.transform.exponents[plane][0].numpy()[:used].astype(np.int64)
    left = (q << (5 - exponents)).astype(np.int16).astype(np.int64)
    sums = (left @ profile.transform.bases[plane][0].numpy()[:used].astype(np.int64)).astype(np.int32)
    mean, scale = (each[plane, 0].numpy() for each in (profile.transform.means, profile.transform.scales))
    x = mean + sums.astype(np.float32) * (STEPS[code] * np.float32(1 / 4064) / scale)
    if plane == 0:
        for row in range(rows):
            x[row] = _rotated(x[row], start + row, profile)
    return x


def _coefficients(tile: bytes, rows: int, width: int) -> np.ndarray:
    states = min(width, 32)
    chosen = tile[4 * states : 4 * states + width]
    lanes = Lanes(struct.unpack_from(f"<{states}I", tile), tile[4 * states + width + width % 2 :], 10)
    q = np.zeros((rows, width), np.int64)
    for row in range(rows):
        for first in range(0, width, 32):
            columns = range(first, min(first + 32, width))
            symbols = lanes.row([FAMILY[chosen[c]] for c in columns])
            for column, symbol in zip(columns, symbols, strict=True):
                q[row, column] = symbol - 31 if symbol != ESCAPE else np.uint16(lanes.word()).astype(np.int16)
    lanes.end()
    return q


def _rotated(x: np.ndarray, position: int, profile: Profile) -> np.ndarray:
    pairs = profile.rotary_size // 2
    cos, sin = np.ones(pairs, np.float32), np.zeros(pairs, np.float32)
    for bit in range(24):
        if position >> bit & 1:
            c, s = profile.rotations[bit].numpy().T
            cos, sin = cos * c - sin * s, cos * s + sin * c
    heads = x.reshape(-1, profile.head_size).copy()
    first = slice(0, 2 * pairs, 2) if profile.interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if profile.interleaved else slice(pairs, 2 * pairs)
    a, b = heads[:, first].copy(), heads[:, second].copy()
    heads[:, first], heads[:, second] = a * cos - b * sin, b * cos + a * sin
    return heads.reshape(-1)
