"""The fate of each chunk of a prompt: asked of every tier, beside whatever engines use them at the time.

For each chunk and tier: it is there, and can be used or cannot; it lies in quarantine; the record of what was evicted
has it. Where it is nowhere: whether it is stored under another salt or another fingerprint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvloom import BackendError, CorruptBlobError, KVLoomError, UnreadableBlobError, envelope, leading, output
from kvloom.inspection import Store, at_once
from kvloom_tools.model import Keys, records_of
from kvloom_tools.stores import QUARANTINE, answers

if TYPE_CHECKING:
    import torch

    from kvloom import Segment

HIT, CORRUPT, EXPIRED, UNREADABLE, EVICTED = "hit", "corrupt", "expired", "unreadable", "evicted"
OTHER_SALT, OTHER_FINGERPRINT, NEVER, GONE = "other salt", "other fingerprint", "never stored", "not there"
_LOOKED_AT = 32
"""Blobs of a store that are looked at to tell how long its chunks are."""
_MOST_PLACES = 256
"""Salts and fingerprints that a chunk is looked for under: anybody may have put records into a store."""
_TELLING = (CORRUPT, EXPIRED, UNREADABLE, EVICTED)
"""States in which a tier has news of a chunk but does not give it, most telling first."""


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of tokens `start` to `end`."""

    start: int
    end: int
    verdict: str
    tiers: tuple[str, ...] = ()
    """The tiers that would give it."""
    why: str = ""
    """The reason why no tier does."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Reasons of tiers that do not give it, though another does."""

    @property
    def said(self) -> str:
        """For people, with the problems."""
        return "; ".join([self.why] * bool(self.why) + [f"{tier}: {text}" for tier, text in self.problems.items()])


@dataclass(frozen=True, slots=True)
class Question:
    """The prompt, and the names to look for it under."""

    keys: Keys
    prompt: torch.Tensor
    salts: Sequence[str]
    """The first is whose prompt it is; chunks that are nowhere are looked for under the others."""
    exact: bool
    """The configuration takes nothing that went through a lossy serializer."""
    verify: bool
    """Read every blob, and check it."""


@dataclass(frozen=True, slots=True)
class _Said:
    """The answer of one tier about one chunk."""

    state: str
    text: str = ""


def fates(opened: Sequence[Store], question: Question, failed: dict[str, KVLoomError]) -> list[Fate]:
    """One for each chunk, in order. Raises BackendError if no tier answers.

    failed: the errors of tiers that are not opened; those of tiers that do not answer are added.
    """
    keys, salt = question.keys, question.salts[0]
    segments = keys.segments(question.prompt, salt)
    names = [str(segment.key) for segment in segments]
    said = {}
    with output.progress("looking into the tiers", len(names) * len(opened)) as step:
        for store in opened:
            try:
                said[store.name] = _Tier(store, question).ask(names, step)
            except BackendError as error:
                failed[store.name] = error
                if not said and store is opened[-1]:
                    raise
    opened = [store for store in opened if store.name in said]
    nowhere = [index for index in range(len(names)) if not any(of[index].state == HIT for of in said.values())]
    silent = [name for name in failed if name not in said]
    elsewhere = _elsewhere(opened, question, {index: segments[index] for index in nowhere}, failed) if nowhere else {}
    return [
        _fate(segment, {name: of[index] for name, of in said.items()}, elsewhere.get(index), silent)
        for index, segment in enumerate(segments)
    ]


def left_of(
    opened: list[Store], question: Question, found: Sequence[Fate], failed: dict[str, KVLoomError]
) -> list[Fate]:  # fmt: skip
    """In the place of the first chunk that no tier gives: the pieces of it, by shorter prompts, that a retrieve takes.

    found: of this question. failed: see `answers`.
    """
    lost = next((fate for fate in found if fate.verdict != HIT), None)
    named = [] if lost is None else question.keys.pieces(question.prompt, lost.start, question.salts[0])
    if lost is None or not named:
        return []
    names = [str(piece.key) for piece in named]
    told = answers(opened, failed, lambda store: _Tier(store, question).ask(names, lambda: None))
    said = {store.name: of for store, of in told}
    fates = [
        _fate(piece, {name: of[index] for name, of in said.items()}, None, ()) for index, piece in enumerate(named)
    ]
    return leading([fate for fate in fates if fate.verdict == HIT], lost.start)


def _fate(segment: Segment, said: Mapping[str, _Said], elsewhere: _Said | None, failed: Collection[str]) -> Fate:
    """failed: the tiers that have said nothing."""
    span = (segment.start, segment.end)
    hits = tuple(name for name, one in said.items() if one.state == HIT)
    told = [(name, one) for state in _TELLING for name, one in said.items() if one.state == state]
    if hits:
        return Fate(*span, HIT, hits, problems={name: one.text for name, one in told if one.state != EVICTED})
    if told:
        (name, first), *rest = told
        return Fate(*span, first.state, why=f"{name}: {first.text}", problems={name: one.text for name, one in rest})
    if elsewhere is not None:
        return Fate(*span, elsewhere.state, why=elsewhere.text)
    verdict = NEVER if not failed and all(one.state == NEVER for one in said.values()) else GONE
    texts = [*(f"{name}: {one.text}" for name, one in said.items()), *(f"{name}: no answer" for name in failed)]
    return Fate(*span, verdict, why="; ".join(texts))


class _Tier:
    """One tier, and how its blobs are judged."""

    def __init__(self, store: Store, question: Question) -> None:
        from kvloom_tools.verify import Examiner

        assert store.choice.serializer is not None
        self.store = store
        self._serializers = {store.choice.serializer.type, "raw"}
        self._exact = question.exact
        self._verify = question.verify
        self._examiner = Examiner(store.backend, self._serializers, store.choice.protection)
        self._departures = store.evictions()

    def ask(self, names: Sequence[str], step: Callable[[], None]) -> list[_Said]:
        """The tier's answer about each key."""
        backend, seconds = self.store.backend, self.store.choice.deadline
        there = self.store.ask(lambda: list(backend.contains_many(names)))
        aside = self.store.ask(lambda: list(backend.contains_many([QUARANTINE + name for name in names])))
        said = [self._absent(name, aside=in_quarantine) for name, in_quarantine in zip(names, aside, strict=True)]
        calls = [(index, partial(self._judge, names[index])) for index, here in enumerate(there) if here]
        for _ in range(len(names) - len(calls)):
            step()
        for index, answer in at_once(calls, seconds=seconds, threads=backend.threads):
            if isinstance(answer, Exception):
                raise BackendError(f"tier {self.store.name}: {type(answer).__name__}: {answer}") from answer
            if answer is not None:  # else it went in this very moment
                said[index] = answer
            step()
        return said

    def _judge(self, name: str) -> _Said | None:
        """Judge a blob that was there a moment ago; None if it is gone."""
        from kvloom_tools.verify import Verdict

        try:
            header = self.store.header(name)
        except CorruptBlobError as error:
            return _Said(CORRUPT, f"corrupt: {error}")
        except UnreadableBlobError as error:
            return _Said(UNREADABLE, f"of no use here: {error}")
        if header is None:
            return None
        problem = self._unusable(header)
        if problem is not None or not self._verify:
            return problem or _Said(HIT)
        finding = self._examiner.examine(name)
        if finding.verdict is Verdict.FAILED:
            raise BackendError(finding.reason)
        return {
            Verdict.OK: _Said(HIT),
            Verdict.CORRUPT: _Said(CORRUPT, f"corrupt: {finding.reason}"),
            Verdict.UNREADABLE: _Said(UNREADABLE, f"of no use here: {finding.reason}"),
        }.get(finding.verdict)

    def _unusable(self, header: envelope.Header) -> _Said | None:
        about, ttl = header.description, self.store.choice.ttl
        if ttl is not None and about.written and about.written + ttl <= time.time():
            past = _ago(time.time() - about.written - ttl)
            return _Said(EXPIRED, f"expired {past} (stored {output.moment(about.written)}, ttl {_span(ttl)})")
        if about.serializer not in self._serializers:
            return _Said(UNREADABLE, f"of no use here: serializer {about.serializer!r} is not this tier's")
        if self._exact and not header.exact:
            return _Said(
                UNREADABLE, f"of no use here: {about.fidelity!r} is not exact, and the configuration says exact"
            )
        return None

    def _absent(self, name: str, *, aside: bool) -> _Said:
        """The answer about a blob that is not there."""
        if aside:
            return _Said(CORRUPT, "corrupt: put into quarantine by kvloom scrub")
        known = self._departures
        gone = None if known is None else known.of(bytes.fromhex(name.rpartition("-")[2]))
        if gone is not None:
            past = _ago(time.time() - gone.when)
            if gone.reason == "corrupt":
                return _Said(CORRUPT, f"corrupt: an engine found it so and removed it {past}")
            if gone.reason == "expired":
                return _Said(EXPIRED, f"expired, and removed {past}")
            return _Said(EVICTED, f"evicted {past} ({gone.reason})")
        choice = self.store.choice
        assert choice.backend is not None
        if choice.backend.cls.bounded:
            return _Said(GONE, "never stored, or evicted by the store itself")
        if known is not None:
            span = f"{output.moment(known.since)} to {output.moment(known.until)}"
            return _Said(NEVER, f"no eviction of it on record, {span}")
        if choice.write != "never" and choice.capacity is None and choice.ttl is None and not choice.quota:
            return _Said(NEVER, "nothing is evicted from it; if it was stored, it was removed by request")
        return _Said(GONE, "never stored, or evicted: there is no record of that")


def chunk_tokens_of(opened: list[Store], keys: Keys, failed: dict[str, KVLoomError]) -> int | None:
    """The number of tokens in a chunk of this model that the tiers hold; None if they hold none that can be read.

    Looks at a few. Where they could all be chunks and pieces of this configuration, that is what they are.
    failed: see `answers`.
    """
    spans = keys.spans()
    listed = answers(opened, failed, lambda store: [*islice(store.entries(f"{keys.fingerprint}/"), _LOOKED_AT)])
    for store, entries in listed:
        lengths, others = [0], [0]
        for entry in entries:
            with suppress(BackendError):
                header = store.ask(partial(store.header, entry.key))
                if header is not None:
                    start, tokens = header.description.start or 0, header.description.num_tokens
                    at = start % keys.chunk_tokens
                    lengths.append(tokens)
                    others.append(0 if (at, at + tokens) in spans else tokens)
        if max(lengths):
            return max(others) or keys.chunk_tokens
    return None


# -- under other names -------------------------------------------------------------------------------------------------


def _elsewhere(
    opened: list[Store], question: Question, wanted: Mapping[int, Segment], failed: dict[str, KVLoomError]
) -> dict[int, _Said]:  # fmt: skip
    """For chunks that are nowhere under their own key: what they are stored under, the nearer reason first.

    A token database may cut the prompt at other places under another name; then nothing can be said of the chunk.
    """
    found: dict[int, _Said] = {}
    places = list(islice(_places(opened, question, failed), _MOST_PLACES))
    with output.progress("looking elsewhere", len(places)) as step:
        for salt, fingerprint, state, text in places:
            segments = question.keys.segments(question.prompt, salt, fingerprint=fingerprint)
            there = {(one.start, one.end): one for one in segments}
            asked = {
                index: there[span] for index, one in wanted.items()
                if index not in found and (span := (one.start, one.end)) in there
            }  # fmt: skip
            for index, tiers in zip(asked, _held(opened, [*asked.values()], failed), strict=True):
                if tiers:
                    found[index] = _Said(state, f"{text} (in {tiers})")
            step()
    return found


def _places(
    opened: list[Store], question: Question, failed: dict[str, KVLoomError]
) -> Iterator[tuple[str, str, str, str]]:  # fmt: skip
    """Salt, fingerprint, verdict, and what to say of a chunk that is there."""
    keys, (salt, *others) = question.keys, question.salts
    for other in others:
        yield other, keys.fingerprint, OTHER_SALT, f"stored under another salt, {other!r}"
    for found, record in records_of(opened, failed).items():
        if found != keys.fingerprint:
            text = "; ".join(differences(record["identity"], keys.identity)) or "another version of kvloom"
            yield salt, found, OTHER_FINGERPRINT, f"stored under another fingerprint, {found[:8]}: {text}"


def _held(opened: list[Store], segments: Sequence[Segment], failed: dict[str, KVLoomError]) -> list[str]:
    """For each segment, the tiers that say they hold it."""
    keys = [str(segment.key) for segment in segments]
    told = answers(opened, failed, lambda store: store.ask(lambda: list(store.backend.contains_many(keys))))
    return [", ".join(store.name for store, there in told if there[index]) for index in range(len(keys))]


def differences(stored: Any, asked: Any, at: str = "") -> list[str]:
    """Field by field, in the words of the spec."""
    if isinstance(stored, Mapping) and isinstance(asked, Mapping):
        return [
            line
            for name in sorted(stored.keys() | asked.keys())
            for line in differences(stored.get(name), asked.get(name), f"{at}.{name}".lstrip("."))
        ]
    stored, asked = json.dumps(stored), json.dumps(asked)
    return [] if stored == asked else [f"{at.partition('.')[2]} is {stored} there, {asked} here"]


# -- times -------------------------------------------------------------------------------------------------------------


def _ago(seconds: float) -> str:
    return f"{_span(max(0.0, seconds))} ago"


def _span(seconds: float) -> str:
    """`12 minutes`: in the largest unit of which there are two."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}s"
    return f"{int(seconds)} second{'s' if int(seconds) != 1 else ''}"
