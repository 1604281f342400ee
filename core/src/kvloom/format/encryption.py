"""Signed and encrypted blobs, for stores that others can write to or read.

Each blob has its own key, derived from a key of the tier and 24 random bytes of the header, so that no nonce is ever
used twice. With it AES-256-GCM makes a tag for every buffer and one for the header, and encrypts if configured.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import hmac
import logging
import mmap
import os
import stat
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from kvloom.errors import ConfigError, UnreadableBlobError
from kvloom.plugins.installing import pip_install
from kvloom.redaction import looks_like_a_key
from kvloom.types import Buffer

log = logging.getLogger(__name__)

Mode = Literal["sign", "encrypt"]

SIGNED, ENCRYPTED = 1, 2
"""Flags of a blob."""
KEY_BYTES = 32
NONCE_BYTES = 24
TAG_BYTES = 16

_HEADER = (1 << 64) - 1
"""The number that the header has among the buffers."""
_STEP_BYTES = 512 << 10
_MOST_KEYS_BYTES = 1 << 20
"""Largest size of a file of keys."""


class Check(Protocol):
    """Verifies a buffer: pass all of it, in order."""

    def update(self, part: memoryview) -> None:
        """The next bytes; those of an encrypted buffer are decrypted where they are."""

    def right(self, digest: bytes) -> bool:
        """Return whether the buffer was complete and unaltered. Call it once."""


class Protection:
    """The keys of a tier's blobs, and their use: signing or encryption."""

    def __init__(self, mode: Mode, keys: Sequence[bytes]) -> None:
        """keys: of 32 bytes. New blobs use the first; blobs of any of them are read, signed or encrypted."""
        _require_cryptography()
        self.mode = mode
        self._keys = {_key_id(key): key for key in keys}
        self._current = _key_id(keys[0])
        self._mine = threading.local()

    @classmethod
    def load(cls, mode: Mode, source: str) -> Protection:
        """Keys from a file, or from the environment variable that `env:NAME` names: one in base64 on each line.

        Raises ConfigError with what to do about it.
        """
        if source.startswith("env:"):
            name = source.removeprefix("env:")
            text = os.environ.get(name)
            if text is None:
                raise ConfigError("keys", f"the environment variable {name} is not set; put keys into it")
        else:
            if looks_like_a_key(source):
                raise ConfigError("keys", "expected a file path or `env:NAME`, got key material; put it into a file")
            text = _content(Path(source).expanduser())
        lines = [line.strip() for line in text.splitlines()]
        keys = [_key(line, number) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
        if not keys:
            raise ConfigError("keys", "no key found; make one with: openssl rand -base64 32")
        return cls(mode, keys)

    def __repr__(self) -> str:
        return f"Protection({self.mode!r}, {len(self._keys)} keys)"

    def begin(self, *, reuse: bool = False) -> BlobKey:
        """For a new blob. reuse: it is encrypted into memory that this thread's next blob with `reuse` overwrites."""
        flags = SIGNED if self.mode == "sign" else SIGNED | ENCRYPTED
        return self._derived(flags, self._current, os.urandom(NONCE_BYTES), self._room if reuse else _fresh_room)

    def open(self, flags: int, key_id: bytes, nonce: bytes) -> BlobKey:
        """For a blob that says this of itself. Raises UnreadableBlobError if none of the keys is that one."""
        if not flags & SIGNED or flags >> 8:  # more flags than go into the key's derivation
            raise UnreadableBlobError("the blob is not signed, and this tier accepts only signed blobs")
        if key_id not in self._keys:
            raise UnreadableBlobError(f"the blob was signed with another key ({key_id.hex()[:8]}...)")
        return self._derived(flags, key_id, nonce, self._room)

    def _derived(self, flags: int, key_id: bytes, nonce: bytes, room: Callable[[int], memoryview]) -> BlobKey:
        context = b"kvloom blob 1" + bytes([flags]) + nonce
        return BlobKey(flags, key_id, nonce, hmac.digest(self._keys[key_id], context, "sha256"), room)

    def _room(self, nbytes: int) -> memoryview:
        # Each thread uses its own again: taking fresh memory from the system takes longer than encrypting.
        room = getattr(self._mine, "room", None)
        if room is None or len(room) < nbytes:
            room = self._mine.room = mmap.mmap(-1, max(1, nbytes))
        return memoryview(room)[:nbytes]


def _fresh_room(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, max(1, nbytes)))[:nbytes]


class BlobKey:
    """The key of one blob."""

    def __init__(
        self, flags: int, key_id: bytes, nonce: bytes, key: bytes, room: Callable[[int], memoryview]
    ) -> None:  # fmt: skip
        self.flags = flags
        self.key_id = key_id
        self.nonce = nonce
        self._key = key
        self._room = room

    def __repr__(self) -> str:
        return f"BlobKey({self.key_id.hex()[:8]}...)"

    @property
    def encrypted(self) -> bool:
        return bool(self.flags & ENCRYPTED)

    def header_tag(self, *parts: Buffer) -> bytes:
        """The tag of a header whose places of checksum and tag are zero."""
        gcm = self._gcm(_HEADER).encryptor()
        for part in parts:
            gcm.authenticate_additional_data(part)
        gcm.finalize()
        return bytes(gcm.tag)

    def sealed(self, views: Sequence[memoryview]) -> tuple[list[memoryview], list[bytes]]:
        """The buffers as they are stored, and a tag for each.

        Encrypted buffers are page-aligned copies, valid as long as `begin` says.
        """
        if not self.encrypted:
            return list(views), [self._tag(number, view) for number, view in enumerate(views)]
        room = self._room(sum(map(len, views)))
        stored, tags, at = [], [], 0
        for number, view in enumerate(views):
            gcm = self._gcm(number).encryptor()
            into = room[at : at + len(view)]
            for start in range(0, len(view), _STEP_BYTES):
                gcm.update_into(view[start : start + _STEP_BYTES], into[start : start + _STEP_BYTES])
            gcm.finalize()
            stored.append(into)
            tags.append(bytes(gcm.tag))
            at += len(view)
        return stored, tags

    def check(self, number: int, *, decrypt: bool = True) -> Check:
        """The check of buffer `number`. decrypt: False leaves an encrypted buffer as it is stored."""
        gcm = self._gcm(number)
        return _Decryption(gcm, in_place=decrypt) if self.encrypted else _Signature(gcm)

    def _tag(self, number: int, view: memoryview) -> bytes:
        gcm = self._gcm(number).encryptor()
        gcm.authenticate_additional_data(view)
        gcm.finalize()
        return bytes(gcm.tag)

    def _gcm(self, number: int) -> Any:
        _, ciphers = _cryptography()
        return ciphers.Cipher(self._algorithm, ciphers.modes.GCM(number.to_bytes(12, "little")))

    @cached_property
    def _algorithm(self) -> Any:
        algorithms, _ = _cryptography()
        return algorithms.AES(self._key)


class _Signature:
    def __init__(self, gcm: Any) -> None:
        self._gcm = gcm.encryptor()

    def update(self, part: memoryview) -> None:
        self._gcm.authenticate_additional_data(part)

    def right(self, digest: bytes) -> bool:
        self._gcm.finalize()
        return hmac.compare_digest(self._gcm.tag, digest)


class _Decryption:
    def __init__(self, gcm: Any, *, in_place: bool) -> None:
        self._gcm = gcm.decryptor()
        self._in_place = in_place

    def update(self, part: memoryview) -> None:
        for start in range(0, len(part), _STEP_BYTES):
            some = part[start : start + _STEP_BYTES]
            self._gcm.update_into(some, some if self._in_place else bytearray(len(some)))

    def right(self, digest: bytes) -> bool:
        from cryptography.exceptions import InvalidTag

        try:
            self._gcm.finalize_with_tag(digest)
        except InvalidTag:
            return False
        return True


def _cryptography() -> tuple[Any, Any]:
    from cryptography.hazmat.primitives import ciphers
    from cryptography.hazmat.primitives.ciphers import algorithms

    return algorithms, ciphers


def _require_cryptography() -> None:
    try:
        _cryptography()
    except ImportError as error:
        remedy = pip_install("kvloom", "protect")
        raise ConfigError("", f"signing and encrypting need cryptography: {remedy}") from error


def _key_id(key: bytes) -> bytes:
    """The key's id in headers: the same on every machine, and reveals nothing about the key."""
    return hashlib.sha256(b"kvloom key id 1" + key).digest()[:16]


def _key(line: str, number: int) -> bytes:
    # Nothing of the line is quoted: it may be a key but for a slip.
    try:
        key = base64.b64decode(line, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        text = f"line {number}: not {KEY_BYTES} bytes in base64; make one with: openssl rand -base64 32"
        raise ConfigError("keys", text)
    if len(set(key)) == 1:
        raise ConfigError("keys", f"line {number}: not random; make one with: openssl rand -base64 32")
    return key


def _content(path: Path) -> str:
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for its writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "not a regular file")
            if os.name == "posix" and stat.S_IMODE(mode) & stat.S_IROTH:
                log.warning("%s can be read by every user of this machine", path)
            content = file.read(_MOST_KEYS_BYTES + 1)
        text = content.decode("ascii")
        if len(content) > _MOST_KEYS_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {_MOST_KEYS_BYTES} bytes")
        return text
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text of keys, or no name of a file"
        raise ConfigError("keys", f"cannot read {path}: {reason}; name a file with keys, or env:NAME") from error
