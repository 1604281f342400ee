"""Requirements on a token database's keys: the inputs that must change them, and those that must not."""

from __future__ import annotations

from collections.abc import Collection

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom import ChunkKey, salt_tag
from kvloom_testkit.remaking import elsewhere
from kvloom_testkit.tokens.examples import few
from kvloom_testkit.tokens.sequences import (
    CHUNK_TOKENS,
    FINGERPRINT,
    SALTS,
    USUAL_CHUNK_TOKENS,
    VOCABULARY,
    Database,
    digests_of,
    segments_of,
    some_tokens,
)

DIGEST_BITS = 256


class KeyRequirements:
    """Mixed into `TokensConformance`, which has the fixture."""

    def test_T04_another_fingerprint_gives_other_digests(self, database: Database) -> None:
        """Another fingerprint changes every digest, also if it is set again on the same instance.

        Why: the fingerprint tells models and layouts apart; KV under a key of another model's would be wrong.

        Usually: it is only prepended to the digest, or read only once.
        """
        one, tokens = database(), some_tokens(4 * CHUNK_TOKENS)
        here = segments_of(one, tokens)
        other = FINGERPRINT[:-1] + "0"
        there = segments_of(database(fingerprint=other), tokens)
        assert not digests_of(here) & digests_of(there)
        one.fingerprint = other
        assert segments_of(one, tokens) == there, "the fingerprint was set anew"

    def test_T05_another_salt_gives_other_digests(self, database: Database) -> None:
        """Another salt changes every digest, however similar the two are.

        Why: the salt keeps tenants apart. The tag in the namespace has eight bytes only: two salts can be found that
        share it, so the digest has to differ too.

        Usually: the salt is stripped, folded or truncated, unencodable characters become question marks, or it is in
        the namespace only.
        """
        one, tokens = database(), some_tokens(4 * CHUNK_TOKENS)
        seen: dict[bytes, str] = {}
        for salt in SALTS:
            for digest in digests_of(segments_of(one, tokens, salt=salt)):
                assert digest not in seen, f"salts {salt[-20:]!r} and {seen[digest][-20:]!r} give the same digest"
                seen[digest] = salt

    def test_T06_every_token_up_to_the_end_counts(self, database: Database) -> None:
        """Changing any one token changes the key of its own segment and of every later one.

        Why: KV depends on all tokens before it. A key that ignores one gives a wrong answer that looks right.

        Usually: tokens are sampled, only the last ones of a segment or a window are digested, or a digest does not
        include the one before.
        """
        one = database()
        tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=3 * CHUNK_TOKENS, max_size=5 * CHUNK_TOKENS)

        @few(40)
        @given(before=tokens, at=st.integers(0, 3 * CHUNK_TOKENS - 1), add=st.integers(1, 9))
        def check(before: list[int], at: int, add: int) -> None:
            after = [*before[:at], before[at] + add, *before[at + 1 :]]
            known = {segment.key for segment in segments_of(one, before)}
            same = [segment for segment in segments_of(one, after) if segment.end > at and segment.key in known]
            assert not same, f"token {at} was changed, and {same[0]} has the key that it had"

        check()
        long = some_tokens(300 * CHUNK_TOKENS)
        there = segments_of(one, long)
        for at in (0, 1, 1023, 2047, 2048, 2049, 4095, 4096, there[-1].end - 1):
            known = digests_of([segment for segment in there if segment.end > at])
            here = segments_of(one, [*long[:at], long[at] ^ 1, *long[at + 1 :]])
            assert not known & digests_of(here), f"token {at} of {len(long)} was changed, and a later key is the same"
        for chunk_tokens, step in ((USUAL_CHUNK_TOKENS, 7), (4096, 389)):  # primes meet every residue of a stride
            one, tokens = database(chunk_tokens=chunk_tokens), some_tokens(11 * chunk_tokens // 4)  # with a tail
            there = segments_of(one, tokens)
            for at in range(0, there[-1].end, step):
                known = digests_of([segment for segment in there if segment.end > at])
                here = segments_of(one, [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]])
                about = f"token {at} was changed, with chunk_tokens={chunk_tokens}, and a later key is the same"
                assert not known & digests_of(here), about

    def test_T07_nothing_after_the_end_counts(self, database: Database) -> None:
        """Tokens after a segment's end, their number, and earlier calls do not change its key.

        Why: a prompt is found by the prefix that it shares with another one.

        Usually: the length of the sequence, a counter or a state of the instance gets into the digest.
        """
        one, prefix = database(), some_tokens(4 * CHUNK_TOKENS)
        there = segments_of(one, prefix)[:-1]
        keys = {segment[:2]: segment.key for segment in segments_of(one, prefix)}
        assert there, f"{len(prefix)} tokens in one segment: shorter prompts will find nothing"

        @few(25)
        @given(rest=st.lists(st.integers(0, VOCABULARY - 1), max_size=3 * CHUNK_TOKENS), other=st.booleans())
        def check(rest: list[int], other: bool) -> None:
            longer = segments_of(database() if other else one, [*prefix, *rest])
            assert longer[: len(there)] == there, f"{len(rest)} tokens were appended"
            assert all(keys.get(each[:2], each.key) == each.key for each in longer), f"{len(rest)} tokens were appended"

        check()

    def test_T08_the_form_of_the_tensor_does_not_count(self, database: Database) -> None:
        """Tokens as int16, int32 or int64, contiguous or not, give the same segments.

        Why: an engine, a router and a command have the same prompt in different tensors.

        Usually: the tensor's memory is digested directly.
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
        """A fresh interpreter, with another hash seed, environment (locale, time zone, devices, rank) and working
        directory, gives the same keys.

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

    def test_T12_keys_have_the_form_of_kvloom(self, database: Database) -> None:
        """A key is `<fingerprint>/<salt tag>`, a depth from 0 that grows along the sequence, and 32 bytes of digest, of
        which at least 128 bits are independent of each other.

        Why: tiers find a tenant's blobs by the namespace, order segments by depth, and parse keys from the names of
        blobs. With 32 bits, two among a hundred thousand segments collide.

        Usually: keys are made by hand, with a shorter digest that is repeated or padded, or with the salt itself in the
        namespace.
        """
        for salt in ("", "tenant", "with/a slash"):
            found = segments_of(database(), some_tokens(5 * CHUNK_TOKENS), salt=salt)
            depths = [each.key.depth for each in found]
            assert depths[0] == 0 and depths == sorted(set(depths)), f"depths: {depths}"
            for key in (each.key for each in found):
                assert isinstance(key, ChunkKey) and key.namespace == f"{FINGERPRINT}/{salt_tag(salt)}"
                assert type(key.digest) is bytes and ChunkKey.parse(str(key)) == key
        one, digests = database(), set[bytes]()
        for seed in range(100):
            digests |= digests_of(segments_of(one, some_tokens(8 * CHUNK_TOKENS, seed=seed)))
            if len(digests) > 2 * DIGEST_BITS:
                break
        bits = _independent_bits(digests)
        assert bits >= min(DIGEST_BITS // 2, len(digests) - 1), f"{len(digests)} digests differ in {bits} bits only"

    def test_T13_every_token_id_is_one_of_its_own(self, database: Database) -> None:
        """Ids of any size and sign count in full, and the boundary between two ids is unambiguous.

        Why: `1 23` and `12 3` are different prompts, and so are 1 and 65537.

        Usually: decimal numbers are joined without a separator, ids are cut to 16 bits or to the largest that a
        vocabulary had at the time, or go through float32, which has 24 bits for them.
        """
        one, filler = database(), some_tokens(CHUNK_TOKENS * 2 - 2)
        small = [(1, 23), (12, 3), (123, 0), (0, 123), (23, 1), (1, -23), (-1, 23), (0, 0), (0, -1), (-1, 0)]
        large = [(1, 255), (1, 256), (256, 1), (0, 65_535), (0, 65_536), (1, 65_536), (0, 2**31 - 1), (0, -(2**31))]
        edges = [(0, each + more) for each in (1 << 15, 1 << 17, 1 << 18, 1 << 20, 1 << 24) for more in (-1, 0, 1)]
        seen: dict[bytes, list[int]] = {}
        for pair in (*small, *large, *edges):
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

    def test_T18_the_same_tokens_elsewhere_have_another_key(self, database: Database) -> None:
        """The same tokens at another place, or behind others, have another key.

        Why: KV depends on its position, and on everything before it.

        Usually: a segment is digested by itself.
        """
        one, block = database(), some_tokens(CHUNK_TOKENS)
        found = segments_of(one, block * 6)
        assert len(digests_of(found)) == len(found), "the same block six times"
        behind = segments_of(one, [*some_tokens(CHUNK_TOKENS, seed=1), *block, *block])
        assert not digests_of(found) & digests_of(behind), "behind other tokens"

    def test_T20_equal_keys_are_equal_segments(self, database: Database) -> None:
        """With any `chunk_tokens`, equal keys mean segments with the same start and end.

        Why: engines with different settings share a store; a chunk under the same key with another start counts as
        damaged for one of them, and both rewrite it for ever.

        Usually: the digest is of all tokens up to the end, however they were cut.
        """
        tokens, seen = some_tokens(12 * CHUNK_TOKENS), dict[ChunkKey, tuple[int, int]]()
        for factor in (1, 2, 3):
            for segment in segments_of(database(chunk_tokens=factor * CHUNK_TOKENS), tokens):
                here = segment[:2]
                assert seen.setdefault(segment.key, here) == here, f"{here} and {seen[segment.key]} have the same key"


def _independent_bits(digests: Collection[bytes]) -> int:
    """Number of independent bits among the digests: the rank of their differences, modulo 2."""
    first, *others = (int.from_bytes(digest, "big") for digest in digests)
    rows: dict[int, int] = {}
    for row in (first ^ other for other in others):
        while row and (leading := row.bit_length()) in rows:
            row ^= rows[leading]
        if row:
            rows[row.bit_length()] = row
    return len(rows)
