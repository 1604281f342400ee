"""Keys to slots to tiers, with workers and an engine that are only pretended: no hit without its bytes."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from offload_support import BLOCKS, KEYS, SPEC, Make, Pretended

from kvloom import ConfigError, EngineConfig
from kvloom_connector_vllm.offload import tiers as offload_tiers
from kvloom_connector_vllm.offload.copy import Blocks
from kvloom_connector_vllm.offload.settings import PieceGeometry
from kvloom_connector_vllm.offload.setup import OffloadSettings
from kvloom_connector_vllm.offload.tiers import Found, Pace, Tiers


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def make(**settings: Any) -> Pretended:
            one = Pretended(tmp_path, **settings)
            stack.callback(one.store.close)
            return one

        yield make


def blobs(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "kv").rglob("[0-9]*-*") if path.is_file())


def test_what_was_stored_is_a_hit_at_once_and_in_a_fresh_process(make: Make) -> None:
    one = make()
    assert one.look(KEYS[:3]) == [Found.MISS] * 3
    assert one.put(KEYS[:3]) == KEYS[:3]
    assert one.look(KEYS[:4], "s") == [Found.HIT] * 3 + [Found.MISS]
    one.get(KEYS[:3])
    assert one.put(KEYS[1:4]) == KEYS[3:4], "what has a slot is not copied again"
    one.store.close()
    other = make()
    assert other.store.lookup(KEYS[0], "r") is Found.ASKED
    other.store.end_step()
    assert other.look(KEYS[:5]) == [Found.HIT] * 4 + [Found.MISS]
    other.get(KEYS[:4])
    assert other.store.counts()["loaded"] == 4


def test_a_hit_takes_few_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM steps on while a request waits. Each step lasts until something is over, or for a while."""
    one = make()
    one.put(KEYS[:3])
    one.store.close()
    monkeypatch.setattr(offload_tiers, "IDLE_SECONDS", 30.0)
    other, steps = make(), 0
    while {other.store.lookup(key, "r") for key in KEYS[:3]} != {Found.HIT}:
        other.store.end_step()
        steps += 1
        assert steps <= 4, "asked, answered, fetched, and one more for the first, which does not wait"


def test_a_step_waits_for_what_is_under_way_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_tiers, "IDLE_SECONDS", 30.0)
    now = 100.0
    pace, never, later, done = Pace(lambda: now), Future(), Future(), Future()  # type: ignore[var-annotated]
    done.set_result(None)
    pace([never])  # nothing came before
    pace([never, done])  # there is news already
    pace([])
    now += 31
    pace([never])  # the step took long enough by itself
    threading.Timer(0.01, later.set_result, [None]).start()
    pace([never, later])
    assert later.done() and not never.done()


def test_damage_is_a_miss_and_stored_anew(make: Make, tmp_path: Path) -> None:
    one = make()
    one.put(KEYS[:3])
    one.store.close()
    damaged = blobs(tmp_path)[1]
    data = bytearray(damaged.read_bytes())
    data[-20] ^= 1
    damaged.write_bytes(data)
    other = make()
    found = other.look(KEYS[:3])
    assert sorted(one.name for one in found) == ["HIT", "HIT", "MISS"]
    lost = KEYS[found.index(Found.MISS)]
    other.get([key for key in KEYS[:3] if key != lost])
    assert other.put([lost]) == [lost]
    other.store.close()
    assert make().look(KEYS[:3]) == [Found.HIT] * 3


def test_a_hit_is_there_until_the_step_is_over(make: Make) -> None:
    one = make(slots=2)
    one.put(KEYS[:2])
    one.settled()
    one.store.end_step()
    assert one.store.lookup(KEYS[0], "r") is Found.HIT
    assert one.put(KEYS[5:7]) == KEYS[5:6], "the other slot is free to take"
    one.settled()
    assert one.store.lookup(KEYS[5], "r") is Found.HIT
    assert one.store.prepare_store(KEYS[8:9]) is None, "both are promised"
    one.get([KEYS[0], KEYS[5]])
    assert one.put(KEYS[8:9]) == KEYS[8:9]


def test_what_is_being_loaded_is_not_written_over(make: Make) -> None:
    one = make(slots=1)
    one.put(KEYS[:1])
    one.settled()
    assert one.look(KEYS[:1]) == [Found.HIT]
    order = one.store.prepare_load(KEYS[:1])
    for _ in range(3):
        one.store.end_step()
    assert one.store.prepare_store(KEYS[1:2]) is None
    assert one.look(KEYS[1:2]) == [Found.MISS]
    one.copy("load", order, [9])
    one.store.complete_load(KEYS[:1])
    assert one.put(KEYS[1:2]) == KEYS[1:2]


def test_more_than_there_are_slots_loads_what_fits(make: Make) -> None:
    one = make(slots=8)
    for begin in range(0, 24, 8):
        one.put(KEYS[begin : begin + 8])
        one.settled()
        one.store.end_step()
    one.store.close()
    other = make(slots=8)
    found = other.look(KEYS[:24])
    assert found == [Found.HIT] * 8 + [Found.MISS] * 16
    other.get(KEYS[:8])


def test_few_slots_go_to_the_head_of_every_group(make: Make) -> None:
    one = make(slots=4)
    positions = {key: number % 3 for number, key in enumerate(KEYS[:6])}
    prepared = one.store.prepare_store(KEYS[:6], positions.__getitem__)
    assert prepared is not None
    assert prepared[0] == [KEYS[0], KEYS[1], KEYS[3], KEYS[4]]
    assert len(set(prepared[1].slots)) == 4


@pytest.mark.parametrize("lacking", ["nothing copied", "one rank", "failed", "not finished"])
def test_what_no_worker_has_copied_is_not_kept(make: Make, lacking: str) -> None:
    one = make(slots=2)
    one.put(KEYS[:2])  # so that there is something else in the slots
    one.settled()
    one.store.end_step()
    prepared = one.store.prepare_store(KEYS[2:4])
    assert prepared is not None
    accepted, order = prepared
    if lacking == "one rank":
        one.copiers[0].store(order, Blocks([0, 1], [2], [0]))
    elif lacking == "failed":
        one.copy("store", order, [BLOCKS, 1])
    elif lacking == "not finished":
        one.copy("store", order, [0, 1])
    one.store.complete_store(accepted, success=lacking != "not finished")
    assert one.look(KEYS[2:4]) == [Found.MISS] * 2
    assert one.put(KEYS[2:4]) == KEYS[2:4], "its slots are free again"
    one.store.end_step()
    assert one.look(KEYS[2:4], "s") == [Found.HIT] * 2
    one.get(KEYS[2:4])


def test_loading_what_was_no_hit_is_refused(make: Make) -> None:
    one = make()
    with pytest.raises(RuntimeError, match="not reported as hits"):
        one.store.prepare_load(KEYS[:1])
    assert one.store.prepare_store(KEYS[:1]) is not None
    with pytest.raises(RuntimeError, match="not reported as hits"):
        one.store.prepare_load(KEYS[:1])


def test_patience_ends(make: Make) -> None:
    clock = [0.0]
    one = make(patience=3.0, now=lambda: clock[0])
    accepted = one.store.prepare_store(KEYS[:1])
    assert accepted is not None, "somebody else computes it, and never ends"
    assert one.store.lookup(KEYS[0], "r") is Found.COMING
    assert one.store.lookup(KEYS[1], "r") is Found.ASKED
    clock[0] = 2.9
    assert one.store.lookup(KEYS[0], "r") is Found.COMING
    clock[0] = 3.1
    assert one.store.lookup(KEYS[0], "r") is Found.MISS
    assert one.store.lookup(KEYS[2], "r") is Found.MISS
    assert one.store.lookup(KEYS[0], "s") is Found.COMING, "each waits by itself"
    one.store.end_request("r")
    assert one.store.lookup(KEYS[0], "r") is Found.COMING


def test_a_tier_that_hangs_keeps_no_scheduler_waiting(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make(patience=0.2)
    hanging = threading.Event()
    monkeypatch.setattr(one.tiers, "find", lambda keys: [hanging.wait(10) and False for _ in keys])
    assert one.look(KEYS[:2]) == [Found.MISS] * 2
    assert not hanging.is_set()
    hanging.set()


def test_a_slot_that_a_worker_still_copies_into_is_nobodys_after_a_reset(make: Make) -> None:
    one = make(slots=2)
    one.put(KEYS[:1])
    one.settled()
    assert one.look(KEYS[:1]) == [Found.HIT]
    loading = one.store.prepare_load(KEYS[:1])
    storing = one.store.prepare_store(KEYS[1:2])
    assert storing is not None
    one.store.reset()
    one.settled()
    one.store.end_step()
    assert one.look(KEYS[:2], "s") == [Found.MISS] * 2
    assert one.store.prepare_store(KEYS[2:4]) is None
    one.copiers[0].store(storing[1], Blocks([0], [1], [0]))
    assert one.store.prepare_store(KEYS[2:4]) is None, "the other rank has not"
    one.copiers[1].store(storing[1], Blocks([0], [1], [0]))
    assert one.put(KEYS[2:4]) == KEYS[2:3]
    one.copy("load", loading, [5])
    assert one.put(KEYS[3:4]) == KEYS[3:4]
    assert one.look(KEYS[2:4]) == [Found.HIT] * 2
    one.get(KEYS[2:4])


@pytest.mark.parametrize("expedited_first", [True, False])
def test_a_slot_of_two_loads_beside_each_other_is_nobodys_until_both_are_over(
    make: Make, expedited_first: bool
) -> None:
    one = make(slots=1)
    one.put(KEYS[:1])
    one.settled()
    assert one.look(KEYS[:1]) == [Found.HIT]
    loads = []
    for _ in range(2):
        loads.append(one.store.prepare_load(KEYS[:1]))
        for copier in one.copiers:
            copier.expect(loads[-1])
    one.store.reset()
    one.settled()
    one.copy("load", loads[expedited_first], [5])
    assert one.store.prepare_store(KEYS[1:2]) is None, "the other load still reads it"
    one.copy("load", loads[not expedited_first], [6])
    assert one.put(KEYS[1:2]) == KEYS[1:2]
    assert one.look(KEYS[1:2]) == [Found.HIT], "and it is not lost for ever"


def test_a_reset_leaves_nothing(make: Make, tmp_path: Path) -> None:
    one = make()
    one.put(KEYS[:3])
    one.store.reset()
    assert [one.store.lookup(key, "r") for key in KEYS[:3]] == [Found.MISS] * 3
    assert one.put(KEYS[:1]) == [], "nothing is kept until all is gone"
    one.settled()
    assert one.look(KEYS[:3]) == [Found.MISS] * 3
    assert blobs(tmp_path) == []
    assert one.put(KEYS[:1]) == KEYS[:1]


def test_nothing_is_a_hit_when_not_all_could_be_deleted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make()
    one.put(KEYS[:3])
    one.settled()
    clear = one.tiers.clear
    monkeypatch.setattr(one.tiers, "clear", lambda: False)
    one.store.reset()
    one.settled()
    assert [one.store.lookup(key, "r") for key in KEYS[:3]] == [Found.MISS] * 3
    monkeypatch.setattr(one.tiers, "clear", clear)
    one.store.reset()
    one.settled()
    assert one.store.lookup(KEYS[0], "r") is Found.ASKED


def test_two_resets_and_one_deletion(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make()
    go = threading.Semaphore(0)
    monkeypatch.setattr(one.tiers, "clear", lambda: go.acquire(timeout=10))
    one.store.reset()
    one.store.reset()
    go.release()
    time.sleep(0.05)
    assert one.store.lookup(KEYS[0], "r") is Found.MISS, "the second has not been done"
    go.release()
    one.settled()
    assert one.store.lookup(KEYS[0], "r") is Found.ASKED


def test_closing_writes_what_was_accepted(make: Make, tmp_path: Path) -> None:
    one = make()
    one.put(KEYS[:8])
    one.store.close()
    one.store.close()
    assert len(blobs(tmp_path)) == 8
    assert not list(tmp_path.glob("rank-*"))
    assert one.store.lookup(KEYS[20], "r") is Found.MISS
    assert one.put(KEYS[20:22]) == []


@pytest.mark.parametrize("seed", range(4))
def test_requests_in_any_order(make: Make, tmp_path: Path, seed: int) -> None:
    """Few slots, many prompts that share heads, tiers that lose blobs: every block that is loaded is the right one."""
    one = make(slots=6)
    chance = random.Random(seed)
    loaded = 0
    for number in range(60):
        prompt = chance.randrange(3) * 100
        keys = [b"%032d" % (prompt + at) for at in range(chance.randrange(1, 7))]
        found = one.look(keys, str(number))
        hits = next((at for at, each in enumerate(found) if each is not Found.HIT), len(found))
        if hits and chance.random() < 0.9:
            one.get(keys[:hits])
            loaded += hits
        one.store.end_step()
        one.put(keys[hits:])
        one.store.end_request(str(number))
        if chance.random() < 0.1 and (files := blobs(tmp_path)):
            chance.choice(files).unlink(missing_ok=True)
        if chance.random() < 0.05:
            one.store.reset()
            one.settled()
    assert loaded > 10
    assert one.store.counts()["hit"] >= loaded


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"connector": "vllm"}, "connector"),
        ({"tokens": "radix"}, "tokens"),
    ],
)
def test_what_would_have_no_effect_is_refused(tmp_path: Path, config: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        Tiers(EngineConfig.load({"tiers": ["memory"], **config}), SPEC, PieceGeometry(piece_bytes=[4]))


def test_settings_name_what_is_wrong() -> None:
    assert OffloadSettings.read({"config": "x.yaml", "staging": "2MiB", "spec_name": "vLLM's"}).staging == 2 << 20
    for extra, name in (({}, "config"), ({"config": "x", "staging": "a lot"}, "staging")):
        with pytest.raises(ConfigError, match=f"kv_connector_extra_config.{name}"):
            OffloadSettings.read(extra)


def test_what_was_said_is_remembered_up_to_a_bound(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = make().tiers
    numbers = iter(range(10**6))

    def fails(*_: object) -> None:
        raise OSError(f"{next(numbers)}: " + "x" * 10_000)

    monkeypatch.setattr(tiers, "_segments", fails)
    for _ in range(3 * offload_tiers._MOST_WARNINGS):
        assert tiers.find([b"key"]) == [False]
    assert len(tiers._warned) == offload_tiers._MOST_WARNINGS and max(map(len, tiers._warned)) < 1000
