"""Requirements of what must not meet: salts, adapters, models, types, block sizes; and of another process."""

from __future__ import annotations

from typing import Any

from kvloom_testkit.engines.base import NotApplicableError, expect
from kvloom_testkit.engines.bench import Bench, Prompt, Session
from kvloom_testkit.engines.process import RefusedError
from kvloom_testkit.engines.prompts import tokens
from kvloom_testkit.engines.rename_barrier import rename_together
from kvloom_testkit.engines.slow_writes import write_while_read

STORE = "kept"
"""The store that other processes are started on."""


def kept(bench: Bench) -> Prompt:
    """A prompt that a process has stored, which has ended."""

    def work() -> Prompt:
        prompt = bench.stem(8)
        session = bench.session("keeps", store=STORE)
        bench.keep(session, [prompt])
        bench.end_session()
        return prompt

    return bench.once("kept", work)


class Separation:
    """Same tokens, other KV."""

    def test_E17_salts_do_not_meet(self, bench: Bench) -> None:
        """KV that was computed under a `cache_salt` is found under that salt, and under no other.

        Why: salts keep tenants apart: a hit tells one what another has asked.

        Usually: keys made from tokens, without the engine's extra keys.
        """
        session = bench.session()
        prompt = tokens(70, 3 * bench.chunk + 5)
        _alone(bench, session, {"prompt": prompt, "salt": "one"})
        for salt in ("two", ""):
            found = _alone(bench, session, {"prompt": prompt, "salt": salt})
            said = f"under {f'the salt {salt!r}' if salt else 'no salt'}"
            expect(not found, f"{found} tokens that were stored under the salt 'one' were found {said}")
        found = _alone(bench, session, {"prompt": prompt, "salt": "one"})
        expect(found >= bench.chunk, f"{found} of {len(prompt)} tokens were found again under the same salt")

    def test_E18_adapters_do_not_meet(self, bench: Bench) -> None:
        """KV that was computed with a LoRA adapter is found with that adapter only.

        Why: adapters change K and V of the same tokens.

        Usually: keys made from tokens, without the engine's extra keys.
        """
        llm = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_num_seqs": 4}
        try:
            session = bench.session("adapters", store="adapters", **llm)
        except RefusedError as error:
            raise NotApplicableError(f"not with adapters: {error}") from error
        request = {"prompt": tokens(71, 3 * bench.chunk + 5)}
        _alone(bench, session, {**request, "lora": bench.adapter(1)}, **llm)
        for lora, said in (("", "without an adapter"), (bench.adapter(2), "with another adapter")):
            found = _alone(bench, session, {**request, "lora": lora}, **llm)
            expect(not found, f"{found} tokens that were stored with an adapter were found {said}")
        _alone(bench, session, {**request, "lora": bench.adapter(1)}, **llm)

    def test_E19_another_process_finds_it(self, bench: Bench) -> None:
        """A new process on the same store finds what another has stored, and answers right.

        Why: a store that outlives the process is the point of having one.

        Usually: keys from `hash()`, which differs between processes, or an index that is in memory only.
        """
        prompt = kept(bench)
        session = bench.session("another", store=STORE, fresh=True)
        (answer,) = bench.ask(session, [prompt])
        if not answer["cached"] and not bench.subject.has_store:
            raise NotApplicableError("nothing was found, and no setting has {tmp}: it seems to have no store")
        expect(answer["cached"] >= bench.chunk, f"{answer['cached']} of {len(prompt)} tokens were found")
        bench.compare(prompt, answer, "in a new process, a prompt")
        longer = prompt[: 2 * bench.chunk] + tokens(72, 10)
        bench.forget(session)
        (answer,) = bench.ask(session, [longer])
        bench.compare(longer, answer, "in a new process, a prompt")

    def test_E20_other_weights_are_a_miss(self, bench: Bench) -> None:
        """A model of the same shape from another directory finds nothing of this one's.

        Why: its answers would come from the other's KV, with no error.

        Usually: keys without the model, for stores that "belong to one model".
        """
        prompt = kept(bench)
        _expect_miss(bench, prompt, "of another model", bench.session("weights", store=STORE, model=bench.model(2)))

    def test_E21_another_type_is_a_miss(self, bench: Bench) -> None:
        """The model in bfloat16 finds nothing of its KV in float32.

        Why: the same bytes are other numbers.

        Usually: keys without the type of the cache.
        """
        prompt = kept(bench)
        _expect_miss(bench, prompt, "in float32", bench.session("type", store=STORE, dtype="bfloat16"))

    def test_E22_another_block_size_is_right(self, bench: Bench) -> None:
        """With blocks of twice the size nothing is found, or what is right for them.

        Why: the same bytes are the KV of other tokens.

        Usually: keys by position without the size of what is stored under them.
        """
        prompt = kept(bench)
        try:
            session = bench.session("blocks", store=STORE, block_size=2 * bench.block)
        except RefusedError as error:
            raise NotApplicableError(f"not with blocks of {2 * bench.block}: {error}") from error
        (answer,) = bench.ask(session, [prompt])
        bench.compare(prompt, answer, f"with blocks of {2 * bench.block}, a prompt")

    def test_E32_two_processes_at_once_are_right(self, bench: Bench) -> None:
        """Two processes that store, load and reset in one store at the same time answer right.

        Why: replicas of a server share a store, and what one writes another reads in the same moment.

        Usually: a draft of a file under a name that both use, or an entry that is there before its bytes are. A file
        that one process writes is kept empty here while the other reads.
        """
        if not bench.subject.has_store:
            raise NotApplicableError("no setting has {tmp}: there is no store to share")
        session = bench.session("one of two", store="shared")
        try:
            other = bench.beside("the other of two", store="shared")
        except RefusedError as error:
            raise NotApplicableError(f"not with a second process: {error}") from error
        both = session, other
        _write_and_read(bench, session, other)
        rename_together((one.engine for one in both), session.store)
        for turn in range(3 if bench.short else 8):
            prompts = [tokens(400 + 10 * turn + number, 3 * bench.chunk + 5) for number in range(5)]
            for order in (prompts, prompts[::-1]):
                for one, answers in zip(both, _at_once(both, "generate", requests=_requests(order)), strict=True):
                    for prompt, answer in zip(order, answers, strict=True):
                        bench.compare(prompt, answer, f"in {one.name} processes, a prompt")
                _at_once(both, "settle")
                for one in both:
                    bench.forget(one)
            if other.engine.call("supports_reset"):
                reset = other.engine.begin("reset")
                answers = session.engine.call("generate", requests=_requests(prompts))
                reset()
                for prompt, answer in zip(prompts, answers, strict=True):
                    bench.compare(prompt, answer, "while another process reset the store, a prompt")


def _write_and_read(bench: Bench, writer: Session, reader: Session) -> None:
    """Ask prompts of one process that is slow to write, and meanwhile of another, which first only reads."""
    for number in range(2 if bench.short else 6):
        request = {"prompt": tokens(700 + number, 3 * bench.chunk + 5), "max_tokens": 1}
        read = {**request, "connector": bench.subject.is_tier}
        answers = write_while_read(writer.engine, reader.engine, writer.store, number, write=request, read=read)
        for answer in answers:
            bench.compare(request, answer, "while another process wrote its files, a prompt")
        for one in (writer, reader):
            bench.forget(one)


def _requests(prompts: list[Prompt]) -> list[dict[str, Any]]:
    return [{"prompt": prompt} for prompt in prompts]


def _at_once(sessions: tuple[Session, Session], name: str, **arguments: Any) -> list[Any]:
    """The answers of two engines to a call that both execute at the same time."""
    waiting = [one.engine.begin(name, **arguments) for one in sessions]
    return [wait() for wait in waiting]


def _alone(bench: Bench, session: Session, request: dict[str, Any], **llm: Any) -> int:
    """Ask with nothing in the engine's own cache, and wait until it is stored; the number of tokens found."""
    bench.forget(session)
    (answer,) = bench.ask(session, [request])
    session.engine.call("settle")
    bench.compare(request, answer, **llm)
    return int(answer["cached"])


def _expect_miss(bench: Bench, prompt: Prompt, of: str, session: Session) -> None:
    (answer,) = bench.ask(session, [prompt])
    expect(not answer["cached"], f"{answer['cached']} tokens were found that were stored {of}")
    bench.compare(prompt, answer, **session.limits)
