"""What a token database must do. See `TokensConformance`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom import ChunkKey, Segment, TokenDatabase
from kvloom.keys import salt_tag
from kvloom_testkit.conformance import Conformance
from kvloom_testkit.examples import few
from kvloom_testkit.remaking import elsewhere
from kvloom_testkit.running import together
from kvloom_testkit.tokens_learning import LearningRequirements

CHUNK_TOKENS = 16
FINGERPRINT = "0123456789abcdef0123456789abcdef"
_ALIKE = ("", "-", "a", "A", "a ", " a", "tenant-1", "tenant-11", "é", "e\u0301", "a\0b", "\ud800")
SALTS = (*_ALIKE, "x" * 999 + "1", "x" * 999 + "2")

Database = Callable[..., TokenDatabase]


def some_tokens(count: int, *, seed: int = 0) -> list[int]:
    """Token ids, the same ones for the same seed."""
    return random.Random(seed).choices(range(50_000), k=count)


def segments_of(database: TokenDatabase, tokens: Sequence[int], *, salt: str = "") -> list[Segment]:
    return database.segments(torch.tensor(tokens, dtype=torch.int64), salt=salt)


def digests_of(segments: Sequence[Segment]) -> set[bytes]:
    return {one.key.digest for one in segments}


class TokensConformance(LearningRequirements, Conformance):
    """Requirements of a `TokenDatabase`.

    `make` is a function that makes a new instance, which has learnt nothing, each time it is called. The tests set its
    `fingerprint` and `chunk_tokens`, as the engine does.
    """

    kind = "tokens"
    contract = TokenDatabase

    @pytest.fixture
    def database(self, opened: Callable[[], TokenDatabase]) -> Database:
        """A function that makes an instance and tells it what the engine does."""

        def database(*, fingerprint: str = FINGERPRINT) -> TokenDatabase:
            one = opened()
            one.fingerprint, one.chunk_tokens = fingerprint, CHUNK_TOKENS
            return one

        return database

    def test_T01_segments_follow_each_other_from_the_beginning(self, database: Database) -> None:
        """Segments begin at token 0 and follow each other without gaps or overlaps; none ends after the last token.

        Why: the engine copies KV by them, and counts the tokens of the leading ones that it finds as a hit.

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
        """A mask whose Falses are the first segments leaves these out; the others and their keys are the same.

        Why: a caller that has the first part of a prompt already asks for the rest, of which the key covers everything.

        Usually: the chain of digests begins anew where the mask does.
        """
        one, tokens = database(), torch.tensor(some_tokens(6 * CHUNK_TOKENS + 5))
        whole = one.segments(tokens)
        for count in range(len(whole) + 1):
            mask = torch.ones(len(tokens), dtype=torch.bool)
            mask[: whole[count - 1].end if count else 0] = False
            assert one.segments(tokens, mask) == whole[count:], f"without the first {count}"
        assert one.segments(tokens, torch.zeros(len(tokens), dtype=torch.bool)) == []

    def test_T03_a_mask_that_fits_no_segments_is_refused(self, database: Database) -> None:
        """ValueError for a mask of another length, one whose Falses are no prefix, or end inside a segment.

        Why: it is a mistake of the caller's, and rounding it would move KV that it did not mean.

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

    def test_T04_another_fingerprint_gives_other_digests(self, database: Database) -> None:
        """With another fingerprint every digest is another, also if it is set anew on the same instance.

        Why: the fingerprint tells models and layouts apart; KV under a key of another model's would be wrong.

        Usually: it is only put in front of the digest, or was read once for all.
        """
        one, tokens = database(), some_tokens(4 * CHUNK_TOKENS)
        here = segments_of(one, tokens)
        other = FINGERPRINT[:-1] + "0"
        there = segments_of(database(fingerprint=other), tokens)
        assert not digests_of(here) & digests_of(there)
        one.fingerprint = other
        assert segments_of(one, tokens) == there, "the fingerprint was set anew"

    def test_T05_another_salt_gives_other_digests(self, database: Database) -> None:
        """With another salt every digest is another, however alike the two are.

        Why: the salt keeps tenants apart. The tag in the namespace has eight bytes only: two salts can be found that
        share it, so the digest has to differ too.

        Usually: the salt is stripped, folded or cut, or is in the namespace only.
        """
        one, tokens = database(), some_tokens(4 * CHUNK_TOKENS)
        seen: dict[bytes, str] = {}
        for salt in SALTS:
            for digest in digests_of(segments_of(one, tokens, salt=salt)):
                assert digest not in seen, f"salts {salt[-20:]!r} and {seen[digest][-20:]!r} give the same digest"
                seen[digest] = salt

    def test_T06_every_token_up_to_the_end_counts(self, database: Database) -> None:
        """Changing any one token changes the key of its own segment and of every later one.

        Why: KV depends on all tokens before it. A key that does not notice one gives a wrong answer that looks right.

        Usually: tokens are sampled, only the last ones are digested, or the digest before is not part of the next.
        """
        one = database()
        tokens = st.lists(st.integers(0, 50_000), min_size=3 * CHUNK_TOKENS, max_size=5 * CHUNK_TOKENS)

        @few(40)
        @given(before=tokens, at=st.integers(0, 3 * CHUNK_TOKENS - 1), add=st.integers(1, 9))
        def check(before: list[int], at: int, add: int) -> None:
            after = [*before[:at], before[at] + add, *before[at + 1 :]]
            known = {segment.key for segment in segments_of(one, before)}
            same = [segment for segment in segments_of(one, after) if segment.end > at and segment.key in known]
            assert not same, f"token {at} was changed, and {same[0]} has the key that it had"

        check()
        long = some_tokens(64 * CHUNK_TOKENS)
        changed = [long[0] + 1, *long[1:]]
        assert not digests_of(segments_of(one, long)) & digests_of(segments_of(one, changed)), "the first of many"

    def test_T07_nothing_after_the_end_counts(self, database: Database) -> None:
        """Tokens after a segment's end, how many there are, and other calls before, leave its key as it is.

        Why: a prompt is found by the beginning that it shares with another one.

        Usually: the length of the sequence, a counter or a state of the instance gets into the digest.
        """
        one, prefix = database(), some_tokens(4 * CHUNK_TOKENS)
        there = segments_of(one, prefix)[:-1]
        keys = {segment[:2]: segment.key for segment in segments_of(one, prefix)}
        assert there, f"{len(prefix)} tokens in one segment: shorter prompts will find nothing"

        @few(25)
        @given(rest=st.lists(st.integers(0, 50_000), max_size=3 * CHUNK_TOKENS), other=st.booleans())
        def check(rest: list[int], other: bool) -> None:
            longer = segments_of(database() if other else one, [*prefix, *rest])
            assert longer[: len(there)] == there, f"{len(rest)} tokens were appended"
            assert all(keys.get(each[:2], each.key) == each.key for each in longer), f"{len(rest)} tokens were appended"

        check()

    def test_T08_the_form_of_the_tensor_does_not_count(self, database: Database) -> None:
        """Tokens as int16, int32 or int64, contiguous or not, give the same segments.

        Why: an engine, a router and a command have the same prompt in different tensors.

        Usually: the bytes of the tensor are digested as they lie in memory.
        """
        one, numbers = database(), [each % 32_000 for each in some_tokens(4 * CHUNK_TOKENS)]
        expected = segments_of(one, numbers)
        wide = torch.tensor(numbers, dtype=torch.int64)
        forms = {
            "int32": wide.int(),
            "int16": wide.short(),
            "every second of int64": torch.stack([wide, -wide], dim=1)[:, 0],
            "every second of int32": torch.stack([wide, -wide], dim=1)[:, 0].int(),
            "the middle of another tensor": torch.cat([wide, wide, wide])[len(wide) : 2 * len(wide)],
        }
        for name, tensor in forms.items():
            assert one.segments(tensor) == expected, name

    def test_T09_another_process_gives_the_same_keys(self, database: Database) -> None:
        """A fresh interpreter, with another hash seed, environment and working directory, gives the same keys.

        Why: KV outlives the process, and other processes and hosts share it.

        Usually: Python's `hash`, an `id`, a process id or an environment variable gets into the digest.
        """
        one, tokens = database(), some_tokens(4 * CHUNK_TOKENS)
        expected = [str(each.key) for salt in ("", "tenant") for each in segments_of(one, tokens, salt=salt)]
        one.close()
        code = (
            f"component.fingerprint, component.chunk_tokens = {FINGERPRINT!r}, {CHUNK_TOKENS}\n"
            f"import torch\ntokens = torch.tensor({tokens})\n"
            "for salt in ('', 'tenant'):\n    for each in component.segments(tokens, salt=salt): print(each.key)\n"
        )
        assert elsewhere(one, code).split() == expected

    def test_T10_asking_changes_nothing(self, database: Database) -> None:
        """`segments` changes neither its arguments nor what the next call returns, whatever is done with the result.

        Why: looking something up is no store, and the caller's tokens are the caller's.

        Usually: a list that is kept is returned itself, or a call takes note of what it was asked.
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
        """Calls from several threads at once return what they would one after another.

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

    def test_T12_keys_have_the_form_of_kvloom(self, database: Database) -> None:
        """A key is `<fingerprint>/<salt tag>`, a depth from 0 that grows along the sequence, and 32 bytes of digest.

        Why: tiers find a tenant's blobs by the namespace, know from the depth what comes before what, and read keys
        back from the names of blobs.

        Usually: keys are made by hand, with a shorter digest or the salt itself in the namespace.
        """
        for salt in ("", "tenant", "with/a slash"):
            found = segments_of(database(), some_tokens(5 * CHUNK_TOKENS), salt=salt)
            depths = [each.key.depth for each in found]
            assert depths[0] == 0 and depths == sorted(set(depths)), f"depths: {depths}"
            for key in (each.key for each in found):
                assert isinstance(key, ChunkKey) and key.namespace == f"{FINGERPRINT}/{salt_tag(salt)}"
                assert type(key.digest) is bytes and ChunkKey.parse(str(key)) == key

    def test_T13_every_token_id_is_one_of_its_own(self, database: Database) -> None:
        """Ids of any size and sign count in full, and where one ends and the next begins is never in doubt.

        Why: `1 23` and `12 3` are different prompts, and so are 1 and 65537.

        Usually: decimal numbers are joined without a separator, or ids are cut to 16 bits.
        """
        one, filler = database(), some_tokens(CHUNK_TOKENS * 2 - 2)
        small = [(1, 23), (12, 3), (123, 0), (0, 123), (23, 1), (1, -23), (-1, 23), (0, 0), (0, -1), (-1, 0)]
        large = [(1, 255), (1, 256), (256, 1), (0, 65_535), (0, 65_536), (1, 65_536), (0, 2**31 - 1), (0, -(2**31))]
        seen: dict[bytes, list[int]] = {}
        for pair in (*small, *large):
            tokens = [*pair, *filler]
            for segment in segments_of(one, tokens):
                here = tokens[: segment.end]
                other = seen.setdefault(segment.key.digest, here)
                assert other == here, f"tokens that begin with {here[:2]} and with {other[:2]} have the same digest"
        try:
            beyond = segments_of(one, [2**32 + 1, 23, *filler])
        except ValueError:
            return
        assert not digests_of(beyond) & set(seen), f"{2**32 + 1} is taken for 1"

    def test_T16_little_or_nothing_is_no_error(self, database: Database) -> None:
        """No tokens have no segments, and very few tokens raise nothing; nor does learning them.

        Why: prompts may be empty, and shorter than anything worth keeping.

        Usually: the first or the last segment is taken without looking whether there is one.
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

        Usually: what is held is set to None and then asked to close again.
        """
        used = database()
        segments_of(used, some_tokens(2 * CHUNK_TOKENS))
        for one in (used, database()):
            one.close()
            one.close()

    def test_T18_the_same_tokens_elsewhere_have_another_key(self, database: Database) -> None:
        """The same tokens at another place, or behind others, have another key.

        Why: KV has its position in it, and everything before it.

        Usually: a segment is digested by itself.
        """
        one, block = database(), some_tokens(CHUNK_TOKENS)
        found = segments_of(one, block * 6)
        assert len(digests_of(found)) == len(found), "the same block six times"
        behind = segments_of(one, [*some_tokens(CHUNK_TOKENS, seed=1), *block, *block])
        assert not digests_of(found) & digests_of(behind), "behind other tokens"
