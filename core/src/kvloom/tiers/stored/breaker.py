"""The circuit breaker of a tier: after failures in a row it is left alone for a while, then asked if it is back."""

from __future__ import annotations

from kvloom.runtime import Runtime

FAILURES = 3
"""Number of failures in a row that open it."""
FIRST_SECONDS = 1.0
MOST_SECONDS = 60.0
"""First and longest pause of a tier, in seconds: it doubles with every probe that fails."""


class Breaker:
    """Closed: calls go through. Open: they do not, but for one probe whenever one is due.

    Failures are counted for each verb on its own: a store that answers questions and hangs when it is read is no better
    than one that does not answer. A probe's success closes it. The back-off starts over only once a real call has
    succeeded as well: a store that answers probes and fails at everything else is left alone longer and longer.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = runtime.lock()
        self._pause_seconds = FIRST_SECONDS
        self._in_a_row: dict[str, int] = {}
        self.open = False
        self.probe_at = 0.0
        """Time of the next probe, while it is open."""

    @property
    def failures(self) -> int:
        """Number of calls of one verb that have failed in a row."""
        return max(self._in_a_row.values(), default=0)

    @property
    def probe_is_due(self) -> bool:
        return self.open and self._runtime.now() >= self.probe_at

    def take_probe(self) -> bool:
        """Return whether the caller is to probe now. If so nobody else is, until a longer back-off is over."""
        with self._lock:
            due = self.probe_is_due
            if due:
                self._back_off()
            return due

    def probe_now(self) -> None:
        """There is a sign of life: do not wait for the back-off to end."""
        with self._lock:
            self.probe_at = self._runtime.now()

    def failed(self, verb: str) -> bool:
        """A call failed; whether that opened the breaker."""
        with self._lock:
            self._in_a_row[verb] = self._in_a_row.get(verb, 0) + 1
            opens = not self.open and self.failures >= FAILURES
            if opens:
                self.open = True
                self._back_off()
            return opens

    def succeeded(self, verb: str) -> bool:
        """A call succeeded in time; whether that closed the breaker."""
        if not self._in_a_row and self._pause_seconds == FIRST_SECONDS:
            return False
        with self._lock:
            self._in_a_row.pop(verb, None)
            if self.failures >= FAILURES:
                return False
            self._pause_seconds = FIRST_SECONDS
            closes, self.open = self.open, False
            return closes

    def answered(self) -> bool:
        """A probe succeeded, whatever it was that failed before; whether that closed the breaker."""
        with self._lock:
            self._in_a_row.clear()
            closes, self.open = self.open, False
            return closes

    def _back_off(self) -> None:
        # Jitter, so that many processes do not come back to a recovering store all at once.
        self.probe_at = self._runtime.now() + self._pause_seconds * (0.8 + 0.4 * self._runtime.random())
        self._pause_seconds = min(MOST_SECONDS, self._pause_seconds * 2)
