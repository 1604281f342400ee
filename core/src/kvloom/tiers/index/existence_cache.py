"""Recent answers of a shared store about keys that this process knows nothing else about."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from kvloom.types import ChunkKey

_MOST = 65536


class ExistenceCache:
    """Answers, each kept for `seconds`; 0: none is kept. From any thread."""

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self._seconds = seconds
        self._now = now
        # By digest. Each operation is atomic; whoever meets another's in between asks the store once more.
        self._answers: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()

    def get(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, bool]:
        """The answers that are young enough."""
        if not self._seconds:
            return {}
        since = self._now() - self._seconds
        found = {key: self._answers.get(key.digest) for key in keys}
        return {key: answer[1] for key, answer in found.items() if answer is not None and answer[0] > since}

    def clear(self) -> None:
        """Forget all answers."""
        self._answers.clear()

    def put(self, keys: Sequence[ChunkKey], there: Mapping[ChunkKey, bool]) -> None:
        """Keep the answers that the store has just given about `keys`."""
        if not self._seconds:
            return
        now = self._now()
        for key in keys:
            self._answers.pop(key.digest, None)
            self._answers[key.digest] = (now, there[key])
        while len(self._answers) > _MOST:
            self._answers.popitem(last=False)
