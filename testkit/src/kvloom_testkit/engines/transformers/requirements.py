"""The requirements of caches of transformers' `generate`."""

from __future__ import annotations

from typing import Any

from kvloom_testkit.engines.base import NotApplicableError, NotMetError, expect
from kvloom_testkit.engines.damage import damage
from kvloom_testkit.engines.process import Engine, EngineError, RefusedError
from kvloom_testkit.engines.prompts import tokens
from kvloom_testkit.engines.rename_barrier import rename_together
from kvloom_testkit.engines.slow_writes import write_while_read
from kvloom_testkit.engines.transformers.caches import CacheBench, Prompt, refused

_KEPT = "kept"
_GROWTH = 4
_LARGEST_RATIO = 5.0


class CacheConformance:
    """A cache around a model: `kvloom check engine transformers --cached MODULE:FUNCTION`, or `--cache MODULE:CLASS`.

    The function is called with a model and returns a context manager with a `generate`; the class is called with the
    model's `config`, once for each `generate`. Answers are compared with the plain model's, whose own cache has as many
    tokens of the prompt. What was found is counted in the model: tokens that it did not compute. A cache may refuse
    more than one plain prompt, and other models, by a ValueError or NotImplementedError.
    """

    def test_G01_opens(self, bench: CacheBench) -> None:
        """A tiny Llama gets the cache, and answers.

        Why: nothing else can be tried without it.

        Usually: other arguments than a model, or a model without a tokenizer or a name refused.
        """
        answer = bench.ask(bench.open("opens"), [tokens(90, 10)])
        expect(len(answer["tokens"][0]) == 8, f"8 tokens were asked for, {len(answer['tokens'][0])} came")

    def test_G02_nothing_to_hit(self, bench: CacheBench) -> None:
        """With an empty store nothing is found, and the answers are the plain model's.

        Why: most calls find nothing, and must not be worse for it.

        Usually: keys that collide, positions that begin elsewhere, or a cache that keeps less than it was given.
        """
        engine = bench.open("nothing")
        for number, length in enumerate((1, 10, bench.chunk, bench.chunk + 1, 3 * bench.chunk + 7)):
            prompt = tokens(10 + number, length)
            answer = bench.ask(engine, [prompt])
            expect(not answer["cached"], f"{answer['cached']} tokens of a prompt were found that nobody had before")
            bench.compare([prompt], answer, "a prompt")

    def test_G03_finds_what_was_stored(self, bench: CacheBench) -> None:
        """A prompt that was computed is found when it is asked again, at least its first chunk.

        Why: that is what a store is for.

        Usually: keys that depend on the call, or `--chunk` that is not the cache's.
        """
        answer = bench.ask(_filled(bench, "finds"), [bench.stem()])
        expect(answer["cached"] >= bench.chunk, f"{answer['cached']} of {len(bench.stem())} tokens were found again")

    def test_G04_partial_hits_are_right(self, bench: CacheBench) -> None:
        """Of prompts that begin as a stored one no more is found than they have in common, and the answers are right.

        Why: wrong KV gives fluent answers to another question, and no error.

        Usually: the whole stored prompt taken, or KV at positions other than its own.
        """
        engine = _filled(bench, "partial")
        for chunks in (1, 2, 4):
            for more in (0, 1, bench.chunk - 1):
                common = chunks * bench.chunk + more
                prompt = bench.stem()[:common] + tokens(1000 + 10 * chunks + more, bench.chunk + 5)
                answer = bench.ask(engine, [prompt])
                text = f"{answer['cached']} tokens were found of a prompt that has {common} in common with a stored one"
                expect(answer["cached"] <= common, text)
                bench.compare([prompt], answer, "a prompt")
        prompt = tokens(40, bench.chunk) + bench.stem()[bench.chunk :]
        answer = bench.ask(engine, [prompt])
        text = f"{answer['cached']} tokens were found of a prompt that ends as a stored one, and begins as none"
        expect(not answer["cached"], text)
        bench.compare([prompt], answer, "a prompt that begins as none")

    def test_G05_exact_multiples_are_right(self, bench: CacheBench) -> None:
        """Prompts that are stored as a whole, of a whole number of chunks, one token more and one less, are right.

        Why: the last token is computed always, so a full hit ends inside what was stored.

        Usually: a hit that covers the last token, whose logits are then another's.
        """
        engine = _filled(bench, "multiples")
        for length in sorted({count * bench.chunk + more for count in (1, 2, 4) for more in (-1, 0, 1)}):
            prompt = bench.stem()[:length]
            for _ in ("found in a longer one", "stored itself"):
                answer = bench.ask(engine, [prompt])
                bench.compare([prompt], answer, "a prompt")

    def test_G06_next_turns_are_right(self, bench: CacheBench) -> None:
        """A prompt that continues an earlier answer gets the right answer, found or not.

        Why: conversations are most of what is asked twice.

        Usually: KV of the last generated token expected, which nobody has computed.
        """
        _need_reuse(bench)
        engine = bench.open("turns")
        history = tokens(20, 2 * bench.chunk + bench.chunk // 2)
        for turn in range(3):
            answer = bench.ask(engine, [history], max_tokens=bench.chunk)
            bench.compare([history], answer, f"turn {turn + 1}", max_tokens=bench.chunk)
            history = history + answer["tokens"][0] + tokens(21 + turn, 9)

    def test_G07_rows_are_right(self, bench: CacheBench) -> None:
        """Each row of a batch gets the answer that it would get alone, some found and some not; or batches are refused.

        Why: the hit of a batch is that of the row with the fewest.

        Usually: one row's KV given to all, or the longest hit taken.
        """
        engine = _filled(bench, "rows") if bench.subject.wraps else bench.open("rows")
        stem = bench.stem()
        rows = [stem, stem[: 2 * bench.chunk] + tokens(30, len(stem) - 2 * bench.chunk), tokens(31, len(stem))]
        for batch in (rows, rows[:2], rows):
            bench.compare(batch, bench.ask(engine, batch, may_refuse=True), f"a batch of {len(batch)} rows")

    def test_G08_padding_is_right(self, bench: CacheBench) -> None:
        """A batch of prompts of two lengths, padded on the left, is answered right, or refused.

        Why: padding moves the positions of a row, so stored KV does not fit it.

        Usually: the attention mask not looked at.
        """
        engine = _filled(bench, "padding") if bench.subject.wraps else bench.open("padding")
        rows = [bench.stem(), bench.stem()[: 3 * bench.chunk]]
        for _ in ("first", "again"):
            answer = bench.ask(engine, rows, may_refuse=True)
            own = bench.without().call("own", rows=rows, split=0)
            expect(answer["tokens"] == own["tokens"], f"{answer['tokens']} and not {own['tokens']}")

    def test_G09_beams_and_samples_are_right(self, bench: CacheBench) -> None:
        """Beams, several answers to one prompt, and samples from a seed are the plain model's, or refused.

        Why: they copy and exchange the rows of the cache while it is in use.

        Usually: a cache whose rows cannot be exchanged, taken for one that can.
        """
        engine = _filled(bench, "beams") if bench.subject.wraps else bench.open("beams")
        refusals = []
        for options in ({"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}):
            try:
                answer = bench.ask(engine, [bench.stem()], may_refuse=True, **options)
            except NotApplicableError as error:
                refusals.append(error)
                continue
            own = bench.without().call("own", rows=[bench.stem()], split=0, **options)
            expect(answer["tokens"] == own["tokens"], f"with {options}: {answer['tokens']} and not {own['tokens']}")
        if len(refusals) == 2:
            raise refusals[0]

    def test_G10_another_process_finds_it(self, bench: CacheBench) -> None:
        """A new process on the same store finds what another has stored, and answers right.

        Why: a store that outlives the process is the point of having one.

        Usually: keys from `hash()`, or an index that is in memory only.
        """
        engine = _reopened(bench, fresh=True)
        answer = bench.ask(engine, [bench.stem()])
        expect(answer["cached"] >= bench.chunk, f"{answer['cached']} of {len(bench.stem())} tokens were found")
        bench.compare([bench.stem()], answer, "in a new process, a prompt")

    def test_G11_two_processes_at_once_are_right(self, bench: CacheBench) -> None:
        """Two processes that store and load in one store at the same time answer right.

        Why: what one writes another reads in the same moment.

        Usually: a draft of a file under a name that both use, or an entry that is there before its bytes are. A file
        that one process writes is kept empty here while the other reads.
        """
        _need_store(bench)
        both = bench.open("shared"), bench.open("shared")
        for number in range(2 if bench.short else 6):
            prompt = tokens(700 + number, 2 * bench.chunk + 5)
            request = {"rows": [prompt]}
            for answer in write_while_read(*both, bench.store("shared"), number, write=request, read=request):
                bench.compare([prompt], answer, "while another process wrote its files, a prompt")
        rename_together(both, bench.store("shared"))
        for turn in range(4 if bench.short else 16):
            prompts = [tokens(400 + 10 * turn + number, 2 * bench.chunk + 5) for number in range(3)]
            for prompt in prompts + prompts[::-1]:
                waiting = [one.begin("generate", rows=[prompt]) for one in both]
                for wait in waiting:
                    bench.compare([prompt], wait(), "in one of two processes, a prompt")

    def test_G12_other_weights_are_a_miss(self, bench: CacheBench) -> None:
        """A model of the same shape with other weights finds nothing of this one's.

        Why: its answers would come from the other's KV, with no error.

        Usually: keys from the model's name or config.
        """
        _expect_miss(bench, "of another model", model=2)

    def test_G13_another_type_is_a_miss(self, bench: CacheBench) -> None:
        """The model in bfloat16 finds nothing of its KV in float32.

        Why: KV of another precision is another model's, though transformers would convert it.

        Usually: keys without the type.
        """
        _expect_miss(bench, "in float32", dtype="bfloat16")

    def test_G14_altered_data_is_a_miss(self, bench: CacheBench) -> None:
        """Answers are right where bits of all files are flipped: it is a miss.

        Why: disks, networks and other programs change bytes, and nothing in the model can tell.

        Usually: no checksum.
        """
        bench.compare(
            [bench.stem()], bench.ask(_damaged(bench, "flip"), [bench.stem()]), "from altered files, a prompt"
        )

    def test_G15_lost_data_is_computed(self, bench: CacheBench) -> None:
        """Answers are right where files vanish or are cut while the process runs.

        Why: a store that others share evicts, and a disk that is full cuts.

        Usually: an exception, or an index that still says that they are there.
        """
        for how in ("remove", "cut"):
            engine = _reopened(bench, how)
            bench.ask(engine, [bench.stem()[: bench.chunk + 1]])
            damage(bench.store(how), how)
            for _ in ("first", "again"):
                bench.compare([bench.stem()], bench.ask(engine, [bench.stem()]), f"after {how} of all files, a prompt")

    def test_G16_windows_are_right_or_refused(self, bench: CacheBench) -> None:
        """A model with sliding windows is answered right, found or not; or it is refused when it is opened or called.

        Why: layers with windows keep the end of a prompt only.

        Usually: KV that a window has dropped taken for the whole prompt's.
        """
        _expect_kind(bench, "windows")

    def test_G17_states_are_right_or_refused(self, bench: CacheBench) -> None:
        """A model with states, here of short convolutions, is answered right, found or not; or it is refused.

        Why: a state stands for all tokens up to one of them, and is of no use behind another.

        Usually: attention's layers restored, and states left as they are when nothing was computed.
        """
        _expect_kind(bench, "states")

    def test_G18_latents_are_right_or_refused(self, bench: CacheBench) -> None:
        """A model with multi-head latent attention is answered right, found or not; or it is refused.

        Why: its K and V have different sizes.

        Usually: one shape taken for both.
        """
        _expect_kind(bench, "latents")

    def test_G19_threads_and_files_do_not_grow(self, bench: CacheBench) -> None:
        """The process has no more threads and open files after many calls than after some.

        Why: both are limited.

        Usually: a thread or a file for each call, closed when it is collected.
        """
        engine = bench.open("many")
        states = []
        for turn in range(2):
            for call in range(15 if bench.short else 60):
                known = bench.stem()[: (1 + call % 3) * bench.chunk] if call % 3 == 0 else []
                bench.ask(engine, [known + tokens(3000 + 500 * turn + call, bench.chunk + call % 9)], max_tokens=2)
            states.append(engine.call("state"))
        for name in ("threads", "descriptors"):
            text = f"{states[0][name]} {name} after some calls, {states[1][name]} after as many again"
            expect(states[1][name] - states[0][name] <= _GROWTH, text)

    def test_G20_leaves_the_model_as_it_was(self, bench: CacheBench) -> None:
        """When the cache is left, the model has its weights, its config, its methods and no more hooks than before.

        Why: it is the caller's model, who goes on with it.

        Usually: `forward` or `generate` of the model replaced, and not put back.
        """
        engine = _filled(bench, "leaves") if bench.subject.wraps else bench.open("leaves")
        bench.ask(engine, [bench.stem()])
        expect(engine.call("leave"), "its weights, config, methods or hooks are others now")

    def test_G21_misses_cost_little(self, bench: CacheBench) -> str:
        """Calls that find nothing take no more than five times as long as the plain model's.

        Why: most calls find nothing, and pay for those that do. With tiny models the ratio is at its worst.

        Usually: every weight of the model read for each call, or a round trip for each chunk.
        """
        engine, plain = bench.open("misses"), bench.without()
        best: dict[str, float] = {}
        for turn in range(10):
            prompts = [tokens(600 + 10 * turn + number, 3 * bench.chunk + number) for number in range(3)]
            for name, one in (("with", engine), ("without", plain)):
                best[name] = min(one.call("time", prompts=prompts), best.get(name, 1e9))
            ratio = best["with"] / best["without"]
            if turn >= 2 and ratio <= _LARGEST_RATIO:
                break
        times = f"{1000 * best['with']:.0f} ms against {1000 * best['without']:.0f} ms without it"
        if ratio > _LARGEST_RATIO:
            raise NotMetError(f"{ratio:.1f} times as long: three calls took {times}")
        return f"{ratio:.2f} times as long: {times}"


def _need_reuse(bench: CacheBench) -> None:
    if not bench.subject.wraps:
        raise NotApplicableError("a class of caches begins anew with each call")


def _need_store(bench: CacheBench) -> None:
    if not bench.subject.has_store:
        raise NotApplicableError("no setting has {tmp}: there is no store to open again")


def _filled(bench: CacheBench, store: str, prompts: tuple[Prompt, ...] = (), **settings: Any) -> Engine:
    """A model in a cache that has seen the stem."""
    _need_reuse(bench)
    engine = bench.open(store, **settings)
    for prompt in prompts or (bench.stem(),):
        bench.ask(engine, [prompt])
    return engine


def _reopened(bench: CacheBench, store: str = _KEPT, *, fresh: bool = False, **settings: Any) -> Engine:
    """A model with other settings, on a store that one with the usual ones has filled."""

    def work() -> bool:
        _filled(bench, _KEPT)
        bench.end_session()
        return True

    _need_store(bench)
    bench.once(_KEPT, work)
    if store != _KEPT:
        bench.copy_of(_KEPT, store)
    return bench.open(store, fresh=fresh, **settings)


def _damaged(bench: CacheBench, how: str) -> Engine:
    _reopened(bench)
    bench.end_session()
    if not damage(bench.copy_of(_KEPT, how), how):
        raise NotApplicableError("there are no files in its directory")
    return bench.open(how)


def _expect_miss(bench: CacheBench, of: str, **settings: Any) -> None:
    answer = bench.ask(_reopened(bench, **settings), [bench.stem()])
    expect(not answer["cached"], f"{answer['cached']} tokens were found that were stored {of}")
    bench.compare([bench.stem()], answer, "a prompt", settings)


def _expect_kind(bench: CacheBench, kind: str) -> None:
    """Answers of a kind of model are right, the prompt being computed, found, continued and a part of another."""
    settings = {"kind": kind}
    try:
        bench.without(**settings)
    except EngineError as error:
        raise NotApplicableError(f"without a cache, {error}") from error
    try:
        engine = bench.open(kind, **settings)
    except RefusedError as error:
        raise refused(error) from error
    prompt = bench.stem()
    others = [prompt[: 2 * bench.chunk] + tokens(200 + more, bench.chunk + more) for more in (0, 1)]
    for asked in (prompt, prompt, *others, prompt[: 2 * bench.chunk], prompt):
        bench.compare([asked], bench.ask(engine, [asked], may_refuse=True), f"with {kind}, a prompt", settings)
