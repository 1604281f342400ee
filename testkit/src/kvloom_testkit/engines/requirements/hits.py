"""Requirements of what is found, and of the answers that come from it."""

from __future__ import annotations

from typing import Any

from kvloom_testkit.engines.base import expect
from kvloom_testkit.engines.bench import Bench, Prompt
from kvloom_testkit.engines.prompts import tokens


class Hits:
    """Starting, and hits within one process."""

    def test_E01_starts(self, bench: Bench) -> None:
        """The engine starts with the connector, and answers a request.

        Why: nothing else can be tried without it.

        Usually: a constructor without `kv_cache_config`, a setting that is missing, or a device that is not there.
        """
        session = bench.session()
        (answer,) = bench.ask(session, [tokens(90, 10)])
        expect(len(answer["tokens"]) == 8, f"8 tokens were asked for, {len(answer['tokens'])} came")

    def test_E02_ends_in_order(self, bench: Bench) -> None:
        """The engine's process ends when it is told to, with stores under way.

        Why: a process that does not end holds its device until somebody kills it.

        Usually: `shutdown` that waits for a thread which waits for work.
        """
        session = bench.session("ends", store="ends")
        bench.ask(session, [bench.stem()])
        bench.collect(session)
        session.engine.close()

    def test_E03_nothing_to_hit(self, bench: Bench) -> None:
        """With an empty store nothing is found, and the answers are those of the engine without a connector.

        Why: most requests find nothing, and must not be worse for it.

        Usually: keys that collide, or saves that change the memory they read.
        """
        session = bench.session()
        for number, length in enumerate((10, bench.block, bench.block + 1, 3 * bench.chunk + 7)):
            prompt = tokens(10 + number, length)
            (answer,) = bench.ask(session, [prompt])
            expect(not answer["cached"], f"{answer['cached']} tokens of a prompt were found that nobody had before")
            bench.compare(prompt, answer)

    def test_E04_finds_what_was_stored(self, bench: Bench) -> None:
        """A prompt is found `--settle` seconds (0.3) after it was computed, at least its first chunk.

        Why: that is what a connector is for. As long as it holds blocks, it is waited for longer.

        Usually: keys that depend on the request, saves that never happen or take longer and hold no blocks, or
        `--chunk` that is not the connector's.
        """
        session = bench.session()
        bench.keep(session, [bench.stem()])
        (answer,) = bench.ask(session, [bench.stem()])
        about = f"{answer['cached']} of a prompt of {bench.length(bench.stem())} tokens were found again"
        text = f"{about}, {bench.subject.settle:g} s or more after it was answered"
        expect(answer["cached"] >= bench.chunk, text)

    def test_E05_claims_only_what_is_stored(self, bench: Bench) -> None:
        """`get_num_new_matched_tokens` claims no tokens behind those that a prompt has in common with a stored one.

        Why: what is claimed is not computed, so the engine answers from memory that nobody has filled.

        Usually: rounding up to a chunk, or looking for the whole prompt and claiming its length.
        """
        for prompt, common, answer in _partial(bench):
            expect(
                answer["cached"] <= common,
                f"{answer['cached']} tokens were claimed; a prompt of {bench.length(prompt)} has {common} stored",
            )

    def test_E06_partial_hits_are_right(self, bench: Bench) -> None:
        """Answers from a hit are those of the engine's own prefix cache at the same split: tokens and logprobs.

        Why: wrong KV gives fluent answers to another question, and no error.

        Usually: a layout other than the one that is assumed, blocks in another order, K and V exchanged.
        """
        for prompt, _, answer in _partial(bench):
            bench.compare(prompt, answer)
        # Attention does not see the order of blocks; who finds the first one in the engine's own cache does.
        session = bench.session()
        bench.keep(session, [bench.stem()])
        bench.ask(session, [bench.stem()])
        for chunks in (1, 2, 3):
            prompt = bench.stem()[: chunks * bench.chunk] + tokens(2000 + chunks, 9)
            (answer,) = bench.ask(session, [prompt])
            bench.compare(prompt, answer, "behind loaded blocks that the engine has now, a prompt")

    def test_E07_continues_behind_the_engines_own_hit(self, bench: Bench) -> None:
        """Blocks are loaded behind those that the engine has itself, and are right.

        Why: the list of a request's blocks begins with those that the engine had, which other requests share.

        Usually: blocks counted from the first of the list, or keys from the first block of the prompt.
        """
        session = bench.session()
        bench.keep(session, [bench.stem()])
        for count in (1, 2, 3):
            bench.forget(session)
            bench.ask(session, [bench.stem()[: count * bench.chunk + bench.block // 4]])
            (answer,) = bench.ask(session, [bench.stem()])
            bench.compare(bench.stem(), answer, f"behind {count * bench.chunk} tokens of the engine's own, a prompt")

    def test_E08_exact_multiples_are_right(self, bench: Bench) -> None:
        """Full hits of prompts of a whole number of blocks or chunks, one token more and one less, are right.

        Why: the last token is computed always, so a full hit ends in the middle of a block that is loaded.

        Usually: a hit that covers the last token, or is shortened in tokens and not in blocks.
        """
        session = bench.session()
        bench.keep(session, [bench.stem()])
        sizes = {count * size for count in (1, 2, 4) for size in (bench.block, bench.chunk)}
        for length in sorted({size + more for size in sizes for more in (-1, 0, 1)}):
            bench.forget(session)
            prompt = bench.stem()[:length]
            (answer,) = bench.ask(session, [prompt])
            bench.compare(prompt, answer)

    def test_E09_batches_are_right(self, bench: Bench) -> None:
        """Requests that are answered together, some with the same prompt, get the answers that each would get alone.

        Why: a connector sees many requests in each step, and some whose blocks are shared.

        Usually: orders to the worker kept one at a time, or by the prompt and not by the request.
        """
        session = bench.session()
        one, other = bench.stem(), bench.stem(2)
        bench.keep(session, [one, other])
        prompts = [one, other, one, one[: 2 * bench.chunk] + tokens(91, 20), other[: bench.chunk + 1], tokens(92, 40)]
        for prompt, answer in zip(prompts, bench.ask(session, prompts, together=True), strict=True):
            bench.compare(prompt, answer, "among six at once, a prompt")

    def test_E10_next_turns_are_right(self, bench: Bench) -> None:
        """A prompt that continues an earlier answer gets the right answer, found or not.

        Why: conversations are most of what is asked twice, and their blocks fill up one token at a time.

        Usually: a block that is saved before its last token is computed, or that came to the request while it decoded.
        """
        session = bench.session()
        history = tokens(20, 2 * bench.chunk + bench.block // 2)
        for turn in range(2 if bench.short else 3):
            request = {"prompt": history, "max_tokens": 2 * bench.chunk}
            (answer,) = bench.ask(session, [request])
            bench.compare(request, answer, f"turn {turn + 1}")
            session.engine.call("settle")
            bench.forget(session)
            history = history + answer["tokens"] + tokens(21 + turn, bench.block // 4)

    def test_E11_chunked_prefill_is_right(self, bench: Bench) -> None:
        """Prompts that are computed in several steps are stored right, and hits in front of them are.

        Why: every long prompt is computed so, with steps that end in the middle of a block.

        Usually: saves that are ordered once, when the request is new, as if all of it were computed in that step. If
        E08 is not met either, see there first: these prompts are hit in full, too.
        """
        step = bench.chunk + bench.block // 2
        session = bench.session("steps", store="steps", max_num_batched_tokens=step, max_num_seqs=4)
        prompts = [bench.stem(), bench.stem()[: 3 * bench.chunk] + tokens(30, 2 * bench.chunk), bench.stem(3)]
        for turn in ("first", "again"):
            for prompt in prompts:
                (answer,) = bench.ask(session, [prompt])
                bench.compare(prompt, answer, f"in steps of {step} tokens, {turn}, a prompt")
            session.engine.call("settle")
            bench.forget(session)


def _partial(bench: Bench) -> list[tuple[Prompt, int, Any]]:
    """Prompts, the number of tokens that they have in common with the beginning of a stored one, and the answers."""

    def work() -> list[tuple[Prompt, int, Any]]:
        session = bench.session()
        bench.keep(session, [bench.stem()])
        found = []
        for chunks in (1, 2, 3, 5):
            for more in (0, 1, bench.block - 1):
                common = min(chunks * bench.chunk + more, len(bench.stem()))
                prompt = bench.stem()[:common] + tokens(1000 + 10 * chunks + more, bench.chunk + 5)
                bench.forget(session)
                (answer,) = bench.ask(session, [prompt])
                found.append((prompt, common, answer))
        prompt = tokens(40, bench.chunk) + bench.stem()[bench.chunk :]  # ends as a stored one, and begins as none
        bench.forget(session)
        (answer,) = bench.ask(session, [prompt])
        return [*found, (prompt, 0, answer)]

    return bench.once("partial", work)
