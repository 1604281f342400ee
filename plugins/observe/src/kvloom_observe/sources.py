"""Sources of a live view: an engine's socket, or a Prometheus endpoint."""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from kvloom import ConfigError, pip_install

from . import ending
from .ending import Ending, in_time
from .live import sockets
from .prometheus.metrics import METRICS

_MAX_METRICS_BYTES = 16 << 20
"""Many times as much as an endpoint of many engines has."""
_MAX_LINE_CHARS = 16 << 10
"""Many times as much as a line of kvloom's metrics has. The time to parse one grows with the square of its length."""

_LINE = re.compile(r"^(?:# (?:HELP|TYPE) )?([A-Za-z0-9_:]+).*$", re.MULTILINE)
_SUFFIXES = ("", "_total", "_created", "_bucket", "_count", "_sum")

Read = Callable[[bool], dict[str, Any]]
"""Gives a snapshot, with columns to plot or without. Raises OSError or ValueError that names the place."""


class _HTTP(Ending, http.client.HTTPConnection):
    pass


class _HTTPS(Ending, http.client.HTTPSConnection):
    pass


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def __init__(self, made: contextlib.ExitStack) -> None:
        super().__init__()
        self._made = made

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, _HTTP), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, _HTTPS), request)

    def _connection(self, kind: type[_HTTP | _HTTPS], *place: Any, **settings: Any) -> _HTTP | _HTTPS:
        return self._made.enter_context(contextlib.closing(kind(*place, **settings)))


class _Redirections(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request: urllib.request.Request, answer: IO[bytes], *about: Any) -> Any:
        """Return the next request. Its predecessor's answer is closed: its body would be read, whatever its length."""
        found = super().redirect_request(request, answer, *about)
        answer.close()
        return found


def _answer(url: str) -> bytes:
    """Raises OSError or HTTPException, also where it is redirected to what is not HTTP."""
    with in_time(), contextlib.ExitStack() as made, _opener(made).open(url, timeout=5.0) as answer:
        content: bytes = answer.read(_MAX_METRICS_BYTES)
    return content


def _opener(made: contextlib.ExitStack) -> urllib.request.OpenerDirector:
    """Return one of HTTP alone: `build_opener` adds FTP, files and data. made: closes its connections."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        _Handler(made), urllib.request.ProxyHandler(), urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(), _Redirections(), urllib.request.UnknownHandler(),
    ):  # fmt: skip
        opener.add_handler(handler)
    return opener


class Source:
    """A source of snapshots."""

    def __init__(self, name: str, read: Read) -> None:
        self.name = name
        self.read = read


def find(word: str | None) -> Source:
    """word: a socket's path, the beginning of its name, a URL, or None for the only engine that runs.

    Raises ConfigError if there is none, or several.
    """
    if word is not None and word.startswith(("http://", "https://")):
        return Source(word, lambda series: scrape(word))
    if word is not None and "://" in word:
        raise ConfigError("ENGINE", f"{word!r}: metrics are asked for by http:// or https://")
    if word is not None and "/" in word:
        return _socket(Path(os.path.expanduser(word)))
    running = sockets.running()
    named = [path for path in running if path.stem == word]
    named = named or [path for path in running if word is None or path.name.startswith(word)]
    if len(named) == 1:
        return _socket(named[0])
    if not named:
        missing = "no engine with `observers: [live]` runs" if word is None else f"no engine {word!r} runs"
        others = f"; there are {', '.join(path.stem for path in running)}" if running else ""
        raise ConfigError("ENGINE", f"{missing}, for this user on this machine{others}")
    raise ConfigError("ENGINE", f"several engines run, name one: {', '.join(path.stem for path in named)}")


def _socket(path: Path) -> Source:
    def read(series: bool) -> dict[str, Any]:
        try:
            return sockets.ask(path, series=series)
        except FileNotFoundError:
            raise OSError(f"{path}: no engine is there, or it has ended; start one with `observers: [live]`") from None
        except ConnectionRefusedError:
            text = "nobody answers: its engine has ended, or it is not a socket; start one with `observers: [live]`"
            raise OSError(f"{path}: {text}") from None
        except (BlockingIOError, TimeoutError):
            raise OSError(f"{path}: its engine does not answer: it is stopped or busy; try again later") from None
        except OSError as error:
            raise OSError(f"{path}: {error.strerror or error}") from None

    return Source(path.stem, read)


def scrape(url: str) -> dict[str, Any]:
    """A snapshot made from metrics; values that they lack are empty. Raises OSError, or ValueError for
    other metrics."""
    try:
        from prometheus_client.parser import text_fd_to_metric_families
    except ImportError:
        remedy = pip_install("kvloom-observe", "prometheus")
        raise ConfigError("ENGINE", f"a URL needs prometheus-client: {remedy}") from None
    until = time.monotonic() + ending.MAX_SECONDS
    try:
        text = _answer(url).decode()
    except urllib.error.HTTPError as error:
        error.close()  # it is the answer, and holds the socket
        raise ValueError(f"{url}: answers with status {error.code}") from None
    except urllib.error.URLError as error:
        raise OSError(f"{url}: {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise OSError(f"{url}: {error or type(error).__name__}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{url}: no metrics of Prometheus") from None
    except ValueError:
        raise ValueError(f"{url}: not a URL that can be fetched; check it") from None
    try:
        families = {family.name: family for family in text_fd_to_metric_families(_of_kvloom(text, until))}
    except TimeoutError as error:
        raise OSError(f"{url}: {error}") from None
    except (ValueError, IndexError):  # the latter comes of an end where the parser looks for a name
        raise ValueError(f"{url}: no metrics of Prometheus") from None
    try:
        return _snapshot(families)
    except (KeyError, IndexError, OverflowError):  # a metric or a label is lacking, or a number is beyond all
        raise ValueError(f"{url}: no metrics of kvloom") from None


def _of_kvloom(text: str, until: float) -> Iterator[str]:
    """The lines of kvloom's own metrics. Parsed, a metric takes many times its length, and there may be any number.

    Raises ValueError at a line that is too long, and TimeoutError once `until`, in monotonic seconds, has passed.
    """
    known = {metric.name + suffix for metric in METRICS for suffix in _SUFFIXES}
    for line in _LINE.finditer(text):
        if time.monotonic() >= until:
            raise TimeoutError(f"its metrics take more than {ending.MAX_SECONDS:g} seconds")
        if line[1] in known:
            if len(line[0]) > _MAX_LINE_CHARS:
                raise ValueError("a line that is too long")
            yield line[0]


def _snapshot(families: dict[str, Any]) -> dict[str, Any]:
    """The snapshot of the first engine at the endpoint."""
    info = families["kvloom_engine_info"].samples[0].labels
    engine = info["engine"]

    def rows(name: str, ending: str = "") -> list[tuple[dict[str, str], float]]:
        family = families.get(name)
        samples = family.samples if family is not None else ()
        return [
            (one.labels, one.value) for one in samples if one.name == name + ending and one.labels["engine"] == engine
        ]

    def by(label: str, name: str, ending: str = "_total") -> dict[str, int]:
        sums: dict[str, int] = {}
        for labels, value in rows(name, ending):
            sums[labels[label]] = sums.get(labels[label], 0) + (int(value) if math.isfinite(value) else 0)
        return sums

    asked, served = by("verb", "kvloom_requested_tokens"), by("verb", "kvloom_served_tokens")
    giving = [verb for verb in asked if verb in ("retrieve", "retrieve_layer", "load", "load_layers")]
    requests = by("verb", "kvloom_requests")
    given = {name: by("tier", f"kvloom_{name}", "") for name in ("tier_blobs", "tier_bytes", "tier_capacity_bytes")}
    waiting, abandoned = by("tier", "kvloom_tier_waiting_bytes", ""), by("tier", "kvloom_tier_abandoned_calls", "")
    states = {labels["tier"]: labels["state"] for labels, value in rows("kvloom_tier_state") if value}
    sources = by("tier", "kvloom_source_tokens")
    read, written = by("tier", "kvloom_read_bytes"), by("tier", "kvloom_written_bytes")
    nothing = {"p50": None, "p99": None}
    return {
        "version": 1, "at": None,
        "engine": {"instance_id": engine, "model": info["model"], "fingerprint": info["fingerprint"],
                   "kvloom": info["version"], "pid": None, "began": None},
        "requests": {
            "count": sum(requests.get(verb, 0) for verb in giving), "asked_tokens": sum(asked[verb] for verb in giving),
            "served_tokens": sum(served.get(verb, 0) for verb in giving), "seconds": nothing, "lately": None,
        },
        "saved": {
            "tokens": sum(served.get(verb, 0) for verb in giving), "prefill_tokens_per_second": None, "seconds": None,
        },
        "tiers": [
            {"name": tier, "state": state, "reason": "", "blobs": given["tier_blobs"].get(tier, 0),
             "bytes": given["tier_bytes"].get(tier, 0), "capacity": given["tier_capacity_bytes"].get(tier),
             "waiting_bytes": waiting.get(tier, 0), "abandoned_calls": abandoned.get(tier, 0),
             "served_tokens": sources.get(tier, 0), "read_bytes": read.get(tier),
             "written_bytes": written.get(tier, 0), "read_seconds": nothing, "write_seconds": nothing}
            for tier, state in states.items()
        ],
        "prefixes": [], "errors": [],
        "missed": by("reason", "kvloom_missed_tokens"), "evicted": by("reason", "kvloom_evicted_chunks"),
        "dropped": by("reason", "kvloom_dropped_chunks"),
    }  # fmt: skip
