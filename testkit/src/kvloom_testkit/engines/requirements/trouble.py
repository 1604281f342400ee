"""Requirements of stores that lose or change what they were given, and of what is seen in the engine's memory."""

from __future__ import annotations

from typing import Any

from kvloom_testkit.engines.base import NotApplicableError, expect
from kvloom_testkit.engines.bench import Bench, Prompt, Session
from kvloom_testkit.engines.damage import damage
from kvloom_testkit.engines.process import RaisedError, RefusedError
from kvloom_testkit.engines.prompts import tokens
from kvloom_testkit.engines.requirements.models import of_kind
from kvloom_testkit.engines.requirements.separation import STORE, kept


class Trouble:
    """Faults, and the engine's memory."""

    def test_E23_lost_loads_are_computed(self, bench: Bench) -> None:
        """The policy `recompute` gives the right answer where files vanish or are cut after they were promised.

        Why: a store that others share evicts between the question and the read.

        Usually: an exception in `start_load_kv`, or blocks that `get_block_ids_with_load_errors` does not name.
        """
        prompt = _stored(bench)
        for how in ("remove", "cut"):
            session, answer = _broken(bench, prompt, how, policy="recompute")
            expect(answer["reason"] == "length", f"{how}: the request ended with {answer['reason']!r}")
            bench.compare(prompt, answer, f"after {how} of all files, a prompt")
            bench.forget(session)
            (answer,) = bench.ask(session, [prompt])
            bench.compare(prompt, answer, f"again after {how} of all files, a prompt")

    def test_E24_altered_data_is_a_miss(self, bench: Bench) -> None:
        """Answers are right where bits of all files are flipped: it is a miss.

        Why: disks, networks and other programs change bytes, and nothing in the engine can tell.

        Usually: no checksum.
        """
        prompt = _stored(bench)
        damage(bench.copy_of(STORE, "altered"), "flip")
        session = bench.session("altered", store="altered")
        (answer,) = bench.ask(session, [prompt])
        bench.compare(prompt, answer, "from altered files, a prompt")

    def test_E25_failed_loads_fail_one_request(self, bench: Bench) -> None:
        """With the policy `fail`, a request whose load fails ends with an error or a right answer, and no other does.

        Why: it is the engine's default policy, and a store that fails must not take the engine with it.

        Usually: an exception in `start_load_kv`, which ends the engine.
        """
        prompt = _stored(bench)
        session, answer = _broken(bench, prompt, "remove", policy="fail")
        if answer["reason"] != "error":
            bench.compare(prompt, answer, "after remove of all files, a prompt")
        other = tokens(80, 2 * bench.chunk)
        (answer,) = bench.ask(session, [other])
        bench.compare(other, answer, "after a request that failed, a prompt")

    def test_E37_failed_steps_are_not_stored(self, bench: Bench) -> None:
        """Answers are right in the next process where computing a step failed in the one before.

        Why: what is not computed is not what the tokens have, and is found with a right checksum.

        Usually: a `wait_for_save` that saves whenever it is called. vLLM calls it on its way out of a step that raised,
        too; `sys.exc_info()` tells.
        """
        session = bench.session("fails", store="failed")
        bench.ask(session, [tokens(90, 6 * bench.chunk)])
        bench.forget(session)
        prompt = tokens(91, 4 * bench.chunk + 1)
        if not session.engine.call("fail", prompt=prompt):
            raise NotApplicableError("the engine went on although computing failed")
        bench.end_session()
        session = bench.session("after it failed", store="failed")
        (answer,) = bench.ask(session, [prompt])
        bench.compare(prompt, answer, "after a step that failed, a prompt")

    def test_E26_claims_fit_the_request(self, bench: Bench) -> None:
        """Claims are not negative, leave the last token of a synchronous load to compute, and are no empty promise.

        Why: the scheduler takes them as they are.

        Usually: a claim of the whole prompt, or a load in the background announced for no tokens.
        """
        _expect_none(bench, "claims")

    def test_E27_promised_blocks_are_filled(self, bench: Bench) -> None:
        """Every token that was promised is written in every layer, or its block named as failed, when its load is done.

        Why: what was in the block before is another request's KV.

        Usually: a load that stops at the first error, a layer that is left out, or a last block promised in part.
        """
        _expect_none(bench, "unfilled")
        if not bench.loads:
            raise NotApplicableError("it loaded nothing")

    def test_E28_writes_only_what_it_loads(self, bench: Bench) -> None:
        """No block changes in a step but those that the model computes and those that are being loaded.

        Why: all others belong to other requests, or to nobody yet.

        Usually: a load that goes on after its request was aborted, an index off by one, a scatter with padding.
        """
        _expect_none(bench, "foreign")


def _stored(bench: Bench) -> Prompt:
    if not bench.subject.has_store:
        raise NotApplicableError("no setting has {tmp}: there is no directory to damage")
    prompt = kept(bench)
    if not any(path.is_file() for path in bench.store(STORE).rglob("*")):
        raise NotApplicableError("there are no files in its directory")
    return prompt


def _broken(bench: Bench, prompt: Prompt, how: str, *, policy: str) -> tuple[Session, Any]:
    """The answer to a prompt whose files are damaged when it has been promised."""
    name = f"{policy}-{how}"
    folder = bench.copy_of(STORE, name)
    session = bench.session(name, store=name, policy=policy)
    session.engine.call("break_loads", how=how, folder=str(folder), asked=bench.subject.is_tier)
    (answer,) = bench.ask(session, [prompt])
    return session, answer


def _expect_none(bench: Bench, kind: str) -> None:
    """No fault of a kind was seen in any session until now, nor in some with a little of everything."""
    failed = ""
    for model in ("dense", "windows", "states"):
        if not bench.faults.get(kind):
            why = bench.once(f"watched {model}", lambda model=model: _watch(bench, model))  # type: ignore[misc]
            failed = failed or why if model == "dense" else failed
    faults = bench.faults.get(kind, [])
    if failed and not faults:
        raise NotApplicableError(f"the requests that would show it failed: {failed}")
    expect(not faults, f"{len(faults)} times or more; " + "; ".join(faults[:3]))


def _watch(bench: Bench, model: str) -> str:
    """A little of everything with a kind of model; why it could not be done, which has a requirement of its own."""
    try:
        session = bench.session(f"watched {model}", store=f"watched-{model}", **of_kind(bench, model))
    except (NotApplicableError, RefusedError) as error:
        if model == "dense":
            raise
        return str(error)
    prompts = [bench.stem(), bench.stem(2), tokens(81, 4 * bench.chunk)]
    try:
        for length in (bench.block // 2, bench.block + 1, bench.block + 1):  # the last one is the engine's own hit
            bench.ask(session, [tokens(83, length)])
        bench.keep(session, prompts)
        bench.ask(session, prompts, together=True)
        bench.forget(session)
        requests = [{"prompt": prompt} for prompt in prompts]
        for steps in (1, 2):
            session.engine.call("abort", requests=requests, steps=steps)
            bench.ask(session, [tokens(82 + steps, 2 * bench.chunk)])
            bench.forget(session)
        bench.ask(session, [prompts[2]])
    except RaisedError as error:
        return str(error)
    finally:
        bench.collect(session)
    return ""
