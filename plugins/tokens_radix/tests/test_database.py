"""The database: keys, salts, fingerprints, threads, forks, settings, and hits through an engine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from radix_support import ends, radix, spans, tokens_of

from kvloom import Buffers, Chunk, ChunkKey, ConfigError, Engine, KVSpec
from kvloom.builtin.raw import RawSerializer

SPEC = KVSpec(model="m", num_layers=1, num_kv_heads=1, head_size=2, dtype="float32")


def after(prefix: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    return torch.cat([prefix, tokens_of(count, seed)])


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_key_is_the_same_however_the_tokens_before_are_cut() -> None:
    one, other = radix(), radix()
    prompt = tokens_of(1000)
    one.learn(after(prompt[:100], 50, 1))
    here, there = one.segments(prompt), other.segments(prompt)
    assert spans(here)[:3] == [(0, 100), (100, 256), (256, 512)]
    assert here[2:] == there[1:]
    assert not {each.key for each in here[:2]} & {each.key for each in there}


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_keys_of_different_trees_are_equal_only_for_the_same_tokens(data: st.DataObject) -> None:
    databases = [radix(chunk_tokens=16, min_tokens=2) for _ in range(3)]
    seen: dict[tuple[str, ChunkKey], tuple[int, list[int]]] = {}
    known: list[list[int]] = [[]]
    for _ in range(data.draw(st.integers(1, 15))):
        base = data.draw(st.sampled_from(known))
        tokens = base[: data.draw(st.integers(0, len(base)))] + data.draw(st.lists(st.integers(0, 2), max_size=40))
        known.append(tokens)
        salt = data.draw(st.sampled_from(["", "a"]))
        database = data.draw(st.sampled_from(databases))
        database.learn(torch.tensor(tokens, dtype=torch.int32), salt=salt)
        for each in (one for every in databases for one in every.segments(torch.tensor(tokens).long(), salt=salt)):
            meaning = (each.start, tokens[: each.end])
            assert seen.setdefault((salt, each.key), meaning) == meaning
            assert ("" if salt else "a", each.key) not in seen


def test_keys_are_these() -> None:
    """They name KV in stores: other keys for the same tokens would orphan all of it."""
    keys = [str(each.key) for each in radix(chunk_tokens=32).segments(torch.arange(50), salt="s")]
    assert [key.rpartition("/")[2][:20] for key in keys] == KNOWN


@pytest.mark.slow
def test_keys_are_these_whatever_the_hash_seed() -> None:
    """The hash seed differs in each run, unless it is set."""
    keys = [str(each.key) for each in radix(chunk_tokens=32).segments(torch.arange(50), salt="s")]
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import torch; from radix_support import radix\n"
        "for each in radix(chunk_tokens=32).segments(torch.arange(50), salt='s'): print(each.key)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).split() == keys


KNOWN = ["0-191821c834dbcaee70", "32-a75626e28c4a00e94"]


def test_neither_salts_nor_fingerprints_meet() -> None:
    database, prompt = radix(), tokens_of(300)
    branch = after(prompt[:100], 200, 1)
    database.learn(prompt, salt="a")
    assert 100 in ends(database.segments(branch, salt="a"))
    assert 100 not in ends(database.segments(branch, salt="b"))
    database.fingerprint = "f" * 32
    assert 100 not in ends(database.segments(branch, salt="a"))


def test_a_mask_selects_whole_segments() -> None:
    database, prompt = radix(), tokens_of(600)
    database.learn(after(prompt[:100], 10, 1))
    whole = database.segments(prompt)
    mask = torch.arange(600) >= 100
    assert database.segments(prompt, mask) == whole[1:]
    with pytest.raises(ValueError, match="Falses"):
        database.segments(prompt, torch.arange(600) >= 99)


@pytest.mark.parametrize(
    ("tokens", "salt", "error"),
    [([1, 2], "", TypeError), (torch.ones(3), "", TypeError), (torch.ones(2, 2).int(), "", ValueError),
     (torch.tensor([2**40]), "", ValueError), (torch.ones(3).int(), None, TypeError)],
)  # fmt: skip
def test_what_is_no_sequence_is_refused(tokens: Any, salt: Any, error: type[Exception]) -> None:
    database = radix()
    with pytest.raises(error):
        database.segments(tokens, salt=salt)


# -- threads and forks -------------------------------------------------------------------------------------------------


def test_threads_learn_and_ask_at_once(tmp_path: Path) -> None:
    database = radix(memory="256KiB", path=tmp_path)
    shared, problems = tokens_of(500), []

    def work(number: int) -> None:
        try:
            for turn in range(60):
                prompt = after(shared[: 100 + turn], 300, 1000 * number + turn)
                found = database.segments(prompt)
                assert [each.start for each in found] == [0, *ends(found)[:-1]]
                database.learn(prompt)
                assert ends(database.segments(prompt))[-1] > 300
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    database.close()
    assert not problems and not any(thread.is_alive() for thread in threads)


def test_a_forked_child_begins_anew_and_never_waits_for_the_parent() -> None:
    database, prompt = radix(), tokens_of(300)
    branch = after(prompt[:100], 200, 1)
    database.learn(prompt)
    with database._lock:  # as if another thread of the parent's were at it
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if 100 not in ends(database.segments(branch)) else 2
                database.close()
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert 100 in ends(database.segments(branch))
    database.close()
    database.close()


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [({"min_tokens": 0}, "min_tokens"), ({"memory": "1KiB"}, "memory"), ({"path": " "}, "path"),
     ({"align_tokens": 0}, "align_tokens"), ({"min_token": 1}, "min_token"), ({"path": "/dev/null/x"}, "path")],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_at_start(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"tokens.*{says}"):
        Engine.open({"tokens": {"type": "radix", **given}}, SPEC)


def test_ends_within_chunks_are_aligned_and_no_segment_is_short() -> None:
    database, prompt = radix(align_tokens=16), tokens_of(300)
    database.learn(prompt)
    assert ends(database.segments(after(prompt[:107], 100, 1)))[0] == 96
    database = radix(min_tokens=64)
    database.learn(prompt)
    assert ends(database.segments(after(prompt[:60], 400, 1)))[:2] == [256, 448]
    assert ends(database.segments(after(prompt[:250], 400, 1)))[:2] == [192, 256]


# -- hits through an engine --------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    config = {"tokens": {"type": "radix", "path": str(tmp_path)}, "tiers": [{"type": "memory", "capacity": "64MiB"}]}
    with Engine.open(config, SPEC) as engine:
        yield engine


def kv_of(tokens: torch.Tensor) -> torch.Tensor:
    """KV every element of which depends on all tokens up to its own."""
    running = torch.cumsum(tokens.double() * 31 + 7, 0) % 65_521
    return running.float().view(1, 1, -1, 1).expand(2, 1, -1, 2).contiguous()


def served(engine: Engine, tokens: torch.Tensor) -> int:
    """Serve like a server: take stored KV, compute the rest, store it."""
    kv = torch.zeros(2, 1, len(tokens), 2)
    mask = engine.retrieve(tokens, kv=kv)
    hit = int(mask.count_nonzero())
    assert bool(mask[:hit].all()), "a hit is a prefix"
    assert torch.equal(kv[:, :, :hit], kv_of(tokens)[:, :, :hit]), "a hit is never wrong"
    kv[:, :, hit:] = kv_of(tokens)[:, :, hit:]
    engine.store(tokens, torch.arange(len(tokens)) >= hit, kv=kv)
    return hit


def test_a_prefix_that_ends_inside_a_chunk_is_a_hit_from_the_third_prompt_on(engine: Engine) -> None:
    system = tokens_of(1000)
    hits = [served(engine, after(system, 300, seed)) for seed in range(1, 6)]
    assert hits == [0, 768, 1000, 1000, 1000]


def test_the_first_sequence_keeps_its_hits_when_others_branch_off(engine: Engine) -> None:
    first = tokens_of(3000)
    served(engine, first)
    for at in range(30, 3000, 170):
        served(engine, after(first[:at], 200, at))
        assert engine.lookup(first).tokens == 3000


def test_a_conversation_hits_all_of_its_last_turn(engine: Engine) -> None:
    talk = tokens_of(700)
    served(engine, talk)
    for turn in range(1, 12):
        longer = after(talk, 90 + turn, turn)
        assert served(engine, longer) >= len(talk) - 15
        talk = longer


def leading(one: list[int], other: list[int]) -> int:
    """Number of common leading tokens of two sequences."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_what_was_stored_is_hit_in_full_and_never_less_than_in_whole_chunks(data: st.DataObject) -> None:
    config = {
        "chunk_tokens": 16, "tokens": {"type": "radix", "min_tokens": 3},
        "tiers": [{"type": "memory", "capacity": "16MiB"}],
    }  # fmt: skip
    known: list[list[int]] = [[]]
    with Engine.open(config, SPEC) as engine:
        for _ in range(data.draw(st.integers(1, 12))):
            base = data.draw(st.sampled_from(known))
            kept = base[: data.draw(st.integers(0, len(base)))]
            prompt = kept + data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=60))
            shared = max(leading(prompt, each) for each in known)
            tokens = torch.tensor(prompt)
            assert served(engine, tokens) >= shared // 16 * 16
            known.append(prompt)
            for each in known[1:]:
                found = engine.segments(torch.tensor(each))
                assert engine.lookup(torch.tensor(each)).tokens == (found[-1].end if found else 0)


def test_serializers_are_told_where_segments_start(monkeypatch: pytest.MonkeyPatch) -> None:
    told: set[tuple[int | None, int]] = set()
    encode = RawSerializer.encode

    def spy(self: RawSerializer, chunk: Chunk) -> Buffers:
        told.add((chunk.start, chunk.num_tokens))
        return encode(self, chunk)

    monkeypatch.setattr(RawSerializer, "encode", spy)
    config = {"tokens": "radix", "tiers": [{"type": "memory", "capacity": "16MiB"}, {"type": "dict"}]}
    with Engine.open(config, SPEC) as engine:
        system, wanted = tokens_of(1000), set()
        for seed in range(3):
            prompt = after(system, 300, seed)
            served(engine, prompt)
            wanted |= {(start, end - start) for start, end in spans(engine.segments(prompt))}
        assert engine.flush(20)
    assert told == wanted and (1000, 24) in told
