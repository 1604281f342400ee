"""`kvloom why`: every verdict after what it says has really happened, beside engines that use the store."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import CHUNK, SPEC, ask, blobs_in, fill, run
from policies_support import eventually

from kvloom import Engine, KVSpec
from kvloom.tiers.index.eviction_history import RECORD

BLOB_BYTES = 8192
"""Size of one chunk's blob: a page of header and a page of payload."""


def config(folder: Path, *, name: str = "kv.yaml", **tier: Any) -> Path:
    """One disk tier, in `folder`."""
    path = folder / name
    block = {"type": "disk", "path": str(folder / "kv"), "deadline": "20s", **tier}
    path.write_text(json.dumps({"chunk_tokens": CHUNK, "tiers": [block]}))
    return path


def verdicts(path: Path, tokens: list[int], *options: object, spec: KVSpec | None = SPEC) -> list[str]:
    return [chunk["verdict"] for chunk in ask(path, tokens, *options, spec=spec)["chunks"]]


def reasons(path: Path, tokens: list[int], *options: object, spec: KVSpec | None = SPEC) -> set[str]:
    return {chunk["why"] for chunk in ask(path, tokens, *options, spec=spec)["chunks"]}


def test_hits_are_named_with_their_tiers_and_a_tail_is_too_short(tmp_path: Path) -> None:
    path = config(tmp_path)
    tokens = fill(path, 3)
    answer = ask(path, [*tokens, 7])
    assert [(chunk["start"], chunk["end"], chunk["verdict"], chunk["tiers"]) for chunk in answer["chunks"]] == [
        (0, 4, "hit", ["disk"]), (4, 8, "hit", ["disk"]), (8, 12, "hit", ["disk"]),
    ]  # fmt: skip
    assert (answer["leading_tokens"], answer["too_short_tokens"]) == (12, 1)
    printed = run("why", path, "--tokens", tmp_path / "tokens.json", "--spec", tmp_path / "spec.json").out
    assert "0-12" in printed and "too short for a chunk of 4 tokens" in printed
    assert "12 of 13 tokens are there from the start, in 3 chunks" in printed
    assert verdicts(path, tokens, "--verify") == ["hit"] * 3
    assert verdicts(path, tokens, spec=None) == ["hit"] * 3, "the store has a record of the model"


def test_what_made_room_is_evicted_and_says_when(tmp_path: Path) -> None:
    path = config(tmp_path, capacity=4 * BLOB_BYTES)
    first = fill(path, 4)
    fill(path, 4, first=100)
    (why,) = reasons(path, first)
    assert verdicts(path, first) == ["evicted"] * 4
    assert re.fullmatch(r"disk: evicted \d+ seconds? ago \(capacity\)", why)
    assert verdicts(path, list(range(100, 116))) == ["hit"] * 4
    assert verdicts(path, list(range(500, 508))) == ["never stored"] * 2
    fill(path, 4)  # and it is a hit again, though the record has it
    assert verdicts(path, first) == ["hit"] * 4


def test_a_tenant_over_its_quota_is_evicted_for_that(tmp_path: Path) -> None:
    path = config(tmp_path, capacity=40 * BLOB_BYTES, quota={"a": 2 * BLOB_BYTES})
    tokens = fill(path, 2, salt="a")
    fill(path, 2, first=100, salt="a")
    (why,) = reasons(path, tokens, "--salt", "a")
    assert verdicts(path, tokens, "--salt", "a") == ["evicted"] * 2 and why.endswith("(quota)")


def test_what_one_process_evicted_the_next_remembers(tmp_path: Path) -> None:
    path = config(tmp_path, capacity=2 * BLOB_BYTES)
    prompts = [fill(path, 2, first=first) for first in (0, 100, 200, 300)]
    assert [verdicts(path, prompt)[0] for prompt in prompts] == ["evicted", "evicted", "evicted", "hit"]
    (record,) = (file for file in (tmp_path / "kv/spec").rglob(Path(RECORD).name) if file.is_file())
    record.write_bytes(b"KVGONE01 and nonsense")
    assert verdicts(path, prompts[0]) == ["not there"] * 2, "a damaged record says nothing"


def test_a_time_to_live_that_passed_is_said_before_and_after_the_blob_goes(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    path = config(tmp_path, ttl="1h")
    tokens = fill(path, 2)
    assert verdicts(path, tokens) == ["hit"] * 2
    clock(3700)
    assert blobs_in(tmp_path / "kv"), "nobody has deleted it"
    (why,) = reasons(path, tokens)
    assert verdicts(path, tokens) == ["expired"] * 2
    assert why.startswith("disk: expired ") and "ttl 60 minutes" in why
    with Engine.open(path, SPEC):
        assert eventually(lambda: not blobs_in(tmp_path / "kv"))
    (why,) = reasons(path, tokens)
    assert verdicts(path, tokens) == ["expired"] * 2 and why.startswith("disk: expired, and removed ")


def test_chunks_of_another_size_are_told(tmp_path: Path) -> None:
    tokens = fill(config(tmp_path), 4)
    path = config(tmp_path, name="other.yaml")
    path.write_text(path.read_text().replace(f'"chunk_tokens": {CHUNK}', f'"chunk_tokens": {2 * CHUNK}'))
    prompt, spec = tmp_path / "tokens.json", tmp_path / "spec.json"
    prompt.write_text(json.dumps(tokens))
    spec.write_text(SPEC.to_json())
    printed = run("why", path, "--tokens", prompt, "--spec", spec).out
    assert f"are chunks of {CHUNK} tokens or more, and this configuration makes them of {2 * CHUNK}" in printed
    assert ask(path, tokens)["stored_chunk_tokens"] == CHUNK
    assert "are chunks of" not in run("why", config(tmp_path), "--tokens", prompt, "--spec", spec).out


def test_pieces_are_shown_and_counted_as_an_engine_counts_them(tmp_path: Path) -> None:
    path = config(tmp_path)
    settings = {**json.loads(path.read_text()), "chunk_tokens": 64}
    path.write_text(json.dumps(settings))
    tokens = torch.arange(200)
    with Engine.open(path, SPEC) as engine:
        engine.store(tokens[:120], kv=torch.zeros(SPEC.blob_shape(120), dtype=torch.bfloat16))
        assert engine.flush(30)
        forecast = [engine.lookup(tokens[:length]).tokens for length in (120, 200, 70)]
    own, longer, short = (ask(path, tokens[:length].tolist()) for length in (120, 200, 70))
    assert forecast == [112, 112, 64] == [answer["leading_tokens"] for answer in (own, longer, short)]
    assert [(one["start"], one["end"]) for one in own["chunks"]] == [(0, 64), (64, 96), (96, 112)]
    assert own["pieces"] == [] and own["too_short_tokens"] == 8
    assert [one["verdict"] for one in longer["chunks"]] == ["hit", "never stored", "never stored"]
    assert [(one["start"], one["end"], one["tiers"]) for one in longer["pieces"]] == [
        (64, 96, ["disk"]), (96, 112, ["disk"]),
    ]  # fmt: skip
    prompt, spec = path.with_name("tokens.json"), path.with_name("spec.json")
    prompt.write_text(json.dumps(tokens.tolist()))
    printed = run("why", path, "--tokens", prompt, "--spec", spec).out
    assert "64-112" in printed and "a piece of the next chunk, kept of a shorter prompt" in printed
    assert "112 of 200 tokens are there from the start, in 3 chunks or pieces of one\n" in printed
    assert "192-200" in printed and "too short for a piece of 16 tokens" in printed
    for file in blobs_in(tmp_path / "kv"):
        if file.name.startswith("0-"):
            file.unlink()
    answer = ask(path, tokens.tolist())
    assert answer["leading_tokens"] == 0 and answer["stored_chunk_tokens"] == 64, "though only pieces are left"
    settings["save_tails"] = False
    path.write_text(json.dumps(settings))
    assert ask(path, tokens[:120].tolist())["too_short_tokens"] == 56
    prompt.write_text(json.dumps(tokens[:120].tolist()))
    assert "too short for a chunk of 64 tokens" in run("why", path, "--tokens", prompt, "--spec", spec).out


def test_a_directory_that_is_not_there_is_said_and_not_made(tmp_path: Path) -> None:
    path = config(tmp_path, path=str(tmp_path / "elsewhere"))
    (tmp_path / "tokens.json").write_text("[1]")
    (tmp_path / "spec.json").write_text(SPEC.to_json())
    for verb in (
        ["why", path, "--tokens", tmp_path / "tokens.json", "--spec", tmp_path / "spec.json"],
        ["scrub", path],
    ):
        assert f"tiers.0.path: there is no directory '{tmp_path}/elsewhere'" in run(*verb, status=2).err
    assert not (tmp_path / "elsewhere").exists()


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_a_flipped_byte_is_found_if_asked_for_and_one_in_a_header_at_once(tmp_path: Path) -> None:
    path = config(tmp_path)
    tokens = fill(path, 3)
    files = blobs_in(tmp_path / "kv")
    flip(files[0], 100)
    flip(files[1], 4096 + 5)
    assert verdicts(path, tokens) == ["corrupt", "hit", "hit"]
    assert verdicts(path, tokens, "--verify") == ["corrupt", "corrupt", "hit"]
    assert all("disk: corrupt: " in chunk["why"] for chunk in ask(path, tokens, "--verify")["chunks"][:2])
    assert ask(path, tokens)["leading_tokens"] == 0
    printed = run("why", path, "--tokens", tmp_path / "tokens.json", "--spec", tmp_path / "spec.json").out
    assert "2 more are behind a chunk that is not there" in printed
    files[2].write_bytes(files[2].read_bytes()[:1000])
    assert verdicts(path, tokens)[2] == "corrupt"


def test_quarantine_and_what_an_engine_removed_are_corrupt(tmp_path: Path) -> None:
    path = config(tmp_path, capacity="1MiB")
    tokens = fill(path, 2)
    first, second = blobs_in(tmp_path / "kv")
    flip(second, 4096 + 5)
    run("scrub", path, status=1)
    answer = ask(path, tokens)["chunks"][1]
    assert (answer["verdict"], answer["why"]) == ("corrupt", "disk: corrupt: put into quarantine by kvloom scrub")
    flip(first, 4096 + 5)
    with Engine.open(path, SPEC) as engine:
        kv = torch.zeros(SPEC.blob_shape(4), dtype=torch.bfloat16)
        assert not engine.retrieve(torch.tensor(tokens[:4]), kv=kv).any()
    answer = ask(path, tokens)["chunks"][0]
    assert answer["verdict"] == "corrupt" and "an engine found it so and removed it" in answer["why"]


def test_another_revision_is_another_fingerprint_with_the_field(tmp_path: Path) -> None:
    path = config(tmp_path)
    tokens = fill(path, 1, replace(SPEC, revision="old"))
    (why,) = reasons(path, tokens)
    assert verdicts(path, tokens) == ["other fingerprint"]
    assert why.startswith("stored under another fingerprint, ")
    assert why.endswith(': revision is "old" there, "abc" here (in disk)')
    fill(path, 1)
    assert verdicts(path, tokens) == ["hit"]


def test_other_salts_are_looked_under_only_if_they_are_given(tmp_path: Path) -> None:
    path = config(tmp_path)
    tokens = fill(path, 1, salt="b")
    assert verdicts(path, tokens) == ["never stored"]
    assert verdicts(path, tokens, "--salt", "a", "--salt", "c") == ["never stored"]
    assert verdicts(path, tokens, "--salt", "a", "--salt", "b") == ["other salt"]
    assert reasons(path, tokens, "--salt", "a", "--salt", "b") == {"stored under another salt, 'b' (in disk)"}
    assert verdicts(path, tokens, "--salt", "b") == ["hit"]
    (salts := tmp_path / "salts.json").write_text('["a", "b"]')
    assert verdicts(path, tokens, "--salts", str(salts)) == ["other salt"]
    assert verdicts(path, tokens, "--salt", "b", "--salts", str(salts)) == ["hit"]
    fill(path, 1, replace(SPEC, revision="old"), salt="a")
    assert verdicts(path, tokens, "--salt", "a", "--salt", "b") == ["other salt"], "the nearer reason"


def test_what_is_of_no_use_is_said_to_be(tmp_path: Path) -> None:
    path = config(tmp_path, serializer="safetensors")
    tokens = fill(path, 1)
    (why,) = reasons(config(tmp_path), tokens)
    assert verdicts(config(tmp_path), tokens) == ["unreadable"]
    assert why == "disk: of no use here: serializer 'safetensors' is not this tier's"


def test_two_tiers_each_have_their_say(tmp_path: Path) -> None:
    path = tmp_path / "kv.yaml"
    near = {"type": "disk", "name": "near", "path": str(tmp_path / "near"), "capacity": 2 * BLOB_BYTES}
    far = {"type": "disk", "name": "far", "path": str(tmp_path / "far")}
    path.write_text(json.dumps({"chunk_tokens": CHUNK, "tiers": [near, far]}))
    tokens = fill(path, 2)
    fill(path, 2, first=100)
    assert [(chunk["verdict"], chunk["tiers"]) for chunk in ask(path, tokens)["chunks"]] == [("hit", ["far"])] * 2
    flip(next(one for one in blobs_in(tmp_path / "near") if one.name.startswith("1-")), 100)
    one, two = ask(path, list(range(100, 108)))["chunks"]
    assert (one["tiers"], two["tiers"]) == (["near", "far"], ["far"]) and "corrupt" in two["elsewhere"]["near"]
    for one in blobs_in(tmp_path / "far"):
        one.unlink()
    answer = ask(path, tokens)["chunks"]
    assert [chunk["verdict"] for chunk in answer] == ["evicted"] * 2
    assert all(chunk["why"].startswith("near: evicted ") for chunk in answer)


# -- beside others -----------------------------------------------------------------------------------------------------


def live(path: Path, told: Connection) -> None:
    with Engine.open(path, SPEC) as engine:
        for number in itertools.count():
            tokens = torch.arange(10_000 + 8 * number, 10_008 + 8 * number)
            engine.store(tokens, kv=torch.zeros(SPEC.blob_shape(8), dtype=torch.bfloat16))
            if number == 50:
                told.send(number)
            time.sleep(0.001)


def test_a_store_that_another_process_uses_is_looked_into_all_the_same(tmp_path: Path) -> None:
    path = config(tmp_path, capacity=8 * BLOB_BYTES)
    tokens = fill(path, 4)
    forking = multiprocessing.get_context("fork")
    mine, told = forking.Pipe(duplex=False)
    other = forking.Process(target=live, args=(path, told), daemon=True)
    other.start()
    try:
        assert mine.poll(60) and mine.recv() == 50
        found = [verdicts(path, tokens, "--verify") for _ in range(5)]
        # The record is written within a minute; before, the command says from when to when it knows.
        assert all(set(one) <= {"evicted", "never stored"} for one in found)
        assert other.is_alive(), "and does it no harm"
    finally:
        other.kill()
        other.join()


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "spec", "problem"),
    [
        ("[1, 2", "{}", "tokens.json: not JSON: "),
        ('["a"]', "{}", "tokens.json: should be a JSON list of token ids"),
        ("[true]", "{}", "tokens.json: should be a JSON list of token ids"),
        ("[4294967296]", "{}", "tokens.json: should be a JSON list of token ids"),
        ("[1]", '{"model": "x"}', "spec.json: should be what KVSpec.to_json() gives: "),
        ("[1]", "[]", "spec.json: should be what KVSpec.to_json() gives: it is a list, not an object"),
        (
            "[1]",
            '{"spec": {"modell": "x"}}',
            "spec.json: should be what KVSpec.to_json() gives: unknown field 'modell'",
        ),
        ("[1]", '{"model": "x"}', "spec.json: should be what KVSpec.to_json() gives: no field 'num_layers'"),
        (
            "[1]",
            '{"model": "x", "num_layers": 1e30, "num_kv_heads": 1, "head_size": 8, "dtype": "int8"}',
            "spec.json: should be what KVSpec.to_json() gives: KVSpec.num_layers must be a whole number",
        ),
        ("[" * 100_000, "{}", "tokens.json: JSON is nested too deeply"),
        ("[1]", None, "spec.json: cannot be read: No such file or directory"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, tokens: str, spec: str | None, problem: str) -> None:
    path = config(tmp_path)
    (tmp_path / "tokens.json").write_text(tokens)
    if spec is not None:
        (tmp_path / "spec.json").write_text(spec)
    arguments = ("--tokens", tmp_path / "tokens.json", "--spec", tmp_path / "spec.json")
    assert run("why", path, *arguments, status=2).err.startswith(f"kvloom: {tmp_path}/{problem}")


def test_a_text_needs_its_tokenizer(tmp_path: Path) -> None:
    path = config(tmp_path)
    text = tmp_path / "prompt.txt"
    text.write_text("hello")
    assert "--tokens: give a prompt" in run("why", path, status=2).err
    assert "--tokenizer: by which tokenizer" in run("why", path, "--text", text, status=2).err
    done = run("why", path, "--text", text, "--tokenizer", tmp_path / "none", status=2)
    assert "--tokenizer: " in done.err and done.err.count("\n") == 1


@pytest.mark.slow
def test_a_text_becomes_the_tokens_of_the_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = Path(__file__).parents[3] / "evals/pylm/weights"
    path, text = config(tmp_path), tmp_path / "prompt.txt"
    text.write_text("The json module " * 20)
    ids = transformers.AutoTokenizer.from_pretrained(model)(text.read_text())["input_ids"]
    with Engine.open(path, SPEC) as engine:
        kv = torch.zeros(SPEC.blob_shape(len(ids)), dtype=torch.bfloat16)
        engine.store(torch.tensor(ids), kv=kv)
        assert engine.flush(30)
    answer = run("why", path, "--text", text, "--tokenizer", model, "--json").json
    assert answer["leading_tokens"] == len(ids) // CHUNK * CHUNK and answer["tokens"] == len(ids)


def test_a_fingerprint_is_told_from_the_others(tmp_path: Path) -> None:
    path = config(tmp_path)
    for spec in (replace(SPEC, revision="old"), replace(SPEC, model="other")):
        fill(path, 1, spec)
    records = {file.stem: file.read_text() for file in (tmp_path / "kv/spec").rglob("*.json")}
    old = next(name for name, text in records.items() if '"revision":"old"' in text)
    other = next(name for name, text in records.items() if '"model":"other"' in text)
    printed = " ".join(run("why", path, "--fingerprint", old[:8]).out.split())
    assert f"fingerprint {old}" in printed and other in printed
    found = run("why", path, "--fingerprint", old[:8], "--json").json
    assert found["fingerprint"] == old and found["left_out"] == {}
    assert [one["fingerprint"] for one in found["others"]] == [other] and found["others"][0]["differs_in"]
    assert 'model is "other" there' in printed and 'revision is "abc" there, "old" here' in printed
    shutil.rmtree(tmp_path / "kv/spec")
    fill(path, 1, replace(SPEC, revision="old"))
    assert "the tiers have records of no other" in run("why", path, "--fingerprint", old[:8]).out
    assert "0 records begin with 'ffff'" in run("why", path, "--fingerprint", "ffff", status=2).err
    for more in (("--tokens", path), ("--text", path), ("--spec", path), ("--salt", "a"), ("--verify",)):
        refused = run("why", path, "--fingerprint", old[:8], *more, status=2).err
        assert refused == "kvloom: --fingerprint: goes with --json alone; leave out what is said of a prompt\n"


def test_what_is_cut_otherwise_under_other_names(tmp_path: Path) -> None:
    pytest.importorskip("kvloom_tokens_radix")
    path = config(tmp_path)
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "chunk_tokens": 64, "tokens": {"type": "radix", "path": f"{tmp_path}/j"}}))
    other = replace(SPEC, revision="other")
    prompt = torch.arange(192, dtype=torch.int32)
    branch = torch.where(prompt < 100, prompt, prompt + 1000)
    with Engine.open(path, SPEC) as engine:
        for tokens in (branch, prompt):
            engine.store(tokens, kv=torch.zeros(SPEC.blob_shape(192), dtype=SPEC.torch_dtype))
        engine.clear()
    with Engine.open(path, other) as engine:
        engine.store(prompt, kv=torch.zeros(SPEC.blob_shape(192), dtype=SPEC.torch_dtype))
    shutil.rmtree(tmp_path / "j")  # of the other model: what `why` makes of it goes with it
    with Engine.open(path, SPEC) as engine:
        for tokens in (branch, prompt):
            engine.store(tokens, kv=torch.zeros(SPEC.blob_shape(192), dtype=SPEC.torch_dtype))
        engine.clear()
    files = sorted((tmp_path / "j").iterdir())
    found = ask(path, prompt.tolist())["chunks"]
    assert [(one["start"], one["end"], one["verdict"]) for one in found] == [
        (0, 64, "other fingerprint"), (64, 100, "never stored"), (100, 128, "never stored"),
        (128, 192, "other fingerprint"),
    ]  # fmt: skip
    assert sorted((tmp_path / "j").iterdir()) == files
