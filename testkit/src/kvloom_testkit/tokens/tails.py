"""Further requirements of token databases that keep what a sequence has behind its last whole chunk."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from kvloom import Segment, TokenDatabase, leading
from kvloom_testkit.requirements import needs
from kvloom_testkit.tokens.sequences import CHUNK_TOKENS, USUAL_CHUNK_TOKENS, Database, some_tokens


class TailRequirements:
    """Mixed into `TokensConformance`, which has the fixture."""

    @needs("pieces")
    def test_T22_a_piece_is_what_a_shorter_sequence_has(self, database: Database) -> None:
        """Each of `pieces` is the last segment of the tokens up to its end, begins at `start` or behind, ends within
        the segment there, and is none of the tokens' own; in order of ends, and under the same salt.

        Why: the engine takes it in the place of a chunk that is nowhere. KV under another key, or of other tokens,
        would be wrong.

        Usually: the salt is left out, or those of another chunk are named as well.
        """
        for one, tokens, salt in _asked(database):
            own = one.segments(tokens, salt=salt)
            for segment in own:
                ends = 0
                for piece in one.pieces(tokens, segment.start, salt=salt):
                    assert segment.start <= piece.start < piece.end <= segment.end, f"{piece[:2]} in {segment[:2]}"
                    assert piece not in own, f"{piece[:2]} is one of the tokens' own"
                    assert one.segments(tokens[: piece.end], salt=salt)[-1] == piece
                    assert piece.end >= ends, f"{piece[:2]} after one that ends at {ends}"
                    ends = piece.end

    @needs("pieces")
    def test_T23_a_longer_sequence_finds_all_that_a_shorter_one_left(self, database: Database) -> None:
        """The own segments of a sequence that begins with a shorter, stored one, and the pieces of the first that is
        lacking, lead to the end of the last segment of the shorter one.

        Why: a conversation goes on; what the turn before left behind its last whole chunk need not be computed again.

        Usually: only the pieces of a tail of the same length are named.
        """
        for one, tokens, salt in _asked(database):
            for shorter in range(0, len(tokens), 5):
                stored = one.segments(tokens[:shorter], salt=salt)
                found = _reached(one, tokens, {segment.key for segment in stored}, salt)
                wanted = stored[-1].end if stored else 0
                assert found == wanted, f"{len(tokens)} tokens find {found} of {wanted} of a sequence of {shorter}"

    @needs("pieces")
    def test_T24_without_tails_there_are_no_pieces(self, database: Database) -> None:
        """Without `save_tails`, there are no pieces, and whole chunks have the keys that they have with it.

        Why: the setting may be changed, and what is stored stays of use.

        Usually: the setting is part of the key.
        """
        tokens = torch.tensor(some_tokens(2 * CHUNK_TOKENS + CHUNK_TOKENS // 2))
        here, there = database(), database()
        there.save_tails = False
        assert [there.pieces(tokens, segment.start) for segment in there.segments(tokens)] == [[], []]
        assert here.segments(tokens)[:2] == there.segments(tokens)

    @needs("pieces")
    def test_T25_everything_that_may_be_kept_is_named(self, database: Database) -> None:
        """`possible` names the segments of these tokens and of every leading part of them, also without `save_tails`.

        Why: who asks for a prompt's KV to be removed does not know in which lengths it was stored, nor under which
        setting.

        Usually: only the pieces of the last chunk are named, or none without the setting.
        """
        chunk_tokens = 4 * CHUNK_TOKENS
        one, other = database(chunk_tokens=chunk_tokens), database(chunk_tokens=chunk_tokens)
        other.save_tails = False
        tokens = torch.tensor(some_tokens(2 * chunk_tokens + 3 * CHUNK_TOKENS))
        named, named_without = set(one.possible(tokens, salt="a")), set(other.possible(tokens, salt="a"))
        for length in range(len(tokens) + 1):
            stored = set(one.segments(tokens[:length], salt="a"))
            assert stored <= named, f"a sequence of {length} leaves {sorted(stored - named)[0][:2]}"
            assert stored <= named_without, f"without save_tails: {sorted(stored - named_without)[0][:2]} stays"


def _asked(database: Database) -> Iterator[tuple[TokenDatabase, torch.Tensor, str]]:
    chance = random.Random(5)
    for chunk_tokens in (CHUNK_TOKENS, USUAL_CHUNK_TOKENS, 2 * USUAL_CHUNK_TOKENS + 8):
        one = database(chunk_tokens=chunk_tokens)
        for salt in ("", "tenant"):
            yield one, torch.tensor(some_tokens(chance.randrange(chunk_tokens, 3 * chunk_tokens))), salt


def _reached(one: TokenDatabase, tokens: torch.Tensor, stored: set[object], salt: str) -> int:
    """The number of tokens that an engine finds."""
    reached = 0
    for segment in one.segments(tokens, salt=salt):
        if segment.key not in stored:
            there: list[Segment] = [each for each in one.pieces(tokens, reached, salt=salt) if each.key in stored]
            return next((each.end for each in reversed(leading(there, reached))), reached)
        reached = segment.end
    return reached
