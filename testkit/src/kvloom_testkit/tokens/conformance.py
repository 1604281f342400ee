"""Requirements of token databases. See `TokensConformance`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvloom import Segment, TokenDatabase
from kvloom_testkit.conformance import Conformance
from kvloom_testkit.process_state import left_as_it_is
from kvloom_testkit.running import together
from kvloom_testkit.tokens.keys import KeyRequirements
from kvloom_testkit.tokens.learning import LearningRequirements
from kvloom_testkit.tokens.sequences import CHUNK_TOKENS, FINGERPRINT, Database, segments_of, some_tokens
from kvloom_testkit.tokens.tails import TailRequirements


class TokensConformance(KeyRequirements, LearningRequirements, TailRequirements, Conformance):
    """Requirements of a `TokenDatabase`.

    `make` is a function that makes a new instance, which has learnt nothing, each time it is called. The tests set its
    `fingerprint`, `chunk_tokens` and `save_tails`, as the engine does.
    """

    kind = "tokens"
    contract = TokenDatabase

    @pytest.fixture
    def database(self, opened: Callable[[], TokenDatabase]) -> Database:
        """A function that makes an instance and tells it what the engine does."""

        def database(*, fingerprint: str = FINGERPRINT, chunk_tokens: int = CHUNK_TOKENS) -> TokenDatabase:
            one = opened()
            one.fingerprint, one.chunk_tokens, one.save_tails = fingerprint, chunk_tokens, True
            return one

        return database

    def test_T01_segments_follow_each_other_from_the_beginning(self, database: Database) -> None:
        """Segments begin at token 0 and follow each other without gaps or overlaps; none ends after the last token.

        Why: the engine copies KV by them, and counts the leading ones that are stored as a hit.

        Usually: a special token at the beginning is left out, or the last segment is as long as all the others.
        """
        one = database()
        for count in (CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 5 * CHUNK_TOKENS + 3, 40 * CHUNK_TOKENS):
            found, at = segments_of(one, some_tokens(count)), 0
            for segment in found:
                assert isinstance(segment, Segment) and type(segment.start) is type(segment.end) is int
                assert segment.start == at < segment.end <= count, f"of {count} tokens: {[s[:2] for s in found]}"
                at = segment.end
        assert found, f"no segment in {count} tokens"

    def test_T02_a_mask_leaves_out_whole_leading_segments(self, database: Database) -> None:
        """A mask that is False for the first segments leaves these out; the others and their keys are the same.

        Why: a caller that has the first part of a prompt asks for the rest, whose keys cover everything.

        Usually: the chain of digests begins anew where the mask does.
        """
        one, tokens = database(), torch.tensor(some_tokens(6 * CHUNK_TOKENS + 5))
        whole = one.segments(tokens)
        for count in range(len(whole) + 1):
            mask = torch.ones(len(tokens), dtype=torch.bool)
            mask[: whole[count - 1].end if count else 0] = False
            assert one.segments(tokens, mask=mask) == whole[count:], f"without the first {count}"
        assert one.segments(tokens, torch.zeros(len(tokens), dtype=torch.bool)) == []

    def test_T03_a_mask_that_fits_no_segments_is_refused(self, database: Database) -> None:
        """ValueError for a mask of another length, or whose False part is not a prefix, or ends inside a segment.

        Why: it is a mistake of the caller, and rounding it would move the wrong KV.

        Usually: only the number of Falses is looked at, or the number is rounded to a whole chunk.
        """
        one, tokens = database(), torch.tensor(some_tokens(6 * CHUNK_TOKENS))
        count, first = len(tokens), one.segments(tokens)[0]
        ramp = torch.arange(count)
        bad = {
            "Trues before Falses": ramp < first.end,
            "a hole": ramp >= first.end,
            "Falses in the middle": (ramp < first.end) | (ramp >= 2 * CHUNK_TOKENS),
            "one entry too many": torch.ones(count + 1, dtype=torch.bool),
            "one entry too few": torch.ones(count - 1, dtype=torch.bool),
            "no entry": torch.ones(0, dtype=torch.bool),
        }
        bad["a hole"][-1] = False
        whole = one.segments(tokens)
        for at in range(count):
            if at not in {0, *(segment.end for segment in whole)} and at < whole[-1].end:
                bad[f"Falses that end at {at}, inside a segment"] = ramp >= at
        for name, mask in bad.items():
            try:
                one.segments(tokens, mask)
            except ValueError:
                continue
            pytest.fail(f"a mask was accepted: {name}")

    def test_T10_asking_changes_nothing(self, database: Database) -> None:
        """`segments` changes neither its arguments nor what the next call returns, whatever is done with the result.

        Why: a lookup must not change anything, and the tokens belong to the caller.

        Usually: an internal list is returned itself, or lookups are recorded.
        """
        one, tokens = database(), torch.tensor(some_tokens(5 * CHUNK_TOKENS + 2))
        mask = torch.ones(len(tokens), dtype=torch.bool)
        copies = tokens.clone(), mask.clone()
        first = one.segments(tokens, mask)
        expected = list(first)
        for cut in (CHUNK_TOKENS // 2, CHUNK_TOKENS, 3 * CHUNK_TOKENS + 1):
            one.segments(torch.cat([tokens[:cut], tokens[:cut] + 1, tokens]))
        first.clear()
        assert one.segments(tokens, mask) == expected
        assert torch.equal(tokens, copies[0]) and torch.equal(mask, copies[1])

    def test_T11_threads_do_not_disturb_each_other(self, database: Database) -> None:
        """Concurrent calls from several threads return the same as sequential ones.

        Why: requests are served on threads, with one token database for all of them.

        Usually: a hasher or a buffer is kept on the instance.
        """
        one = database()
        tokens = [some_tokens(20 * CHUNK_TOKENS, seed=seed) for seed in range(4)]
        expected = [segments_of(one, each, salt=str(number)) for number, each in enumerate(tokens)]

        def ask(number: int) -> None:
            for _ in range(15):
                assert segments_of(one, tokens[number], salt=str(number)) == expected[number]
                one.learn(torch.tensor(some_tokens(CHUNK_TOKENS, seed=-1 - number)), salt=str(number))

        together(*(lambda number=number: ask(number) for number in range(len(tokens))))  # type: ignore[misc]

    def test_T16_little_or_nothing_is_no_error(self, database: Database) -> None:
        """No tokens have no segments, and very few tokens raise nothing; nor does learning them.

        Why: prompts may be empty, and shorter than anything worth keeping.

        Usually: the first or the last segment is taken without checking that there is one.
        """
        one = database()
        for count in (0, 1, 2, CHUNK_TOKENS - 1):
            tokens = torch.tensor(some_tokens(count), dtype=torch.int64)
            for mask in (None, torch.ones(count, dtype=torch.bool), torch.zeros(count, dtype=torch.bool)):
                found = one.segments(tokens, mask)
                assert all(0 <= each.start < each.end <= count for each in found)
                assert found == [] or (count and mask is not None and bool(mask[0])) or (count and mask is None)
            one.learn(tokens)

    def test_T17_closing_twice_is_fine(self, database: Database) -> None:
        """`close` may be called twice, also on an instance that was never used.

        Why: an engine that fails to open closes what it has, and then its owner closes the engine.

        Usually: the resource is set to None, and then closed again.
        """
        used = database()
        segments_of(used, some_tokens(2 * CHUNK_TOKENS))
        for one in (used, database()):
            one.close()
            one.close()

    def test_T21_leaves_the_process_as_it_is(self, database: Database) -> None:
        """Cutting and learning change neither logging, signals and warnings, nor random numbers, nor the settings of
        torch.

        Why: it runs inside a server, before every request.

        Usually: `random.seed`, so that keys are the same every time; or `logging.basicConfig`.
        """
        tokens = torch.tensor(some_tokens(5 * CHUNK_TOKENS))
        with left_as_it_is():
            one = database()
            one.learn(tokens)
            one.segments(tokens, salt="tenant")
            one.close()
