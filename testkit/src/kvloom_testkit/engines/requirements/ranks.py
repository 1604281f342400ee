"""Requirements of models that are split over two processes."""

from __future__ import annotations

from typing import Any

from kvloom_testkit.engines.base import NotApplicableError, expect
from kvloom_testkit.engines.bench import Bench
from kvloom_testkit.engines.damage import damage
from kvloom_testkit.engines.process import RefusedError
from kvloom_testkit.engines.prompts import tokens
from kvloom_testkit.engines.requirements.separation import STORE, kept

_TWO: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
_RANKS = "ranks"


class Ranks:
    """Tensor parallelism: each rank has some of the heads."""

    def test_E35_two_ranks_are_right(self, bench: Bench) -> None:
        """With two ranks a prompt is found again, by another process too, and answered right; so it is if one lost KV.

        Why: each rank has other heads in blocks of the same number, and one may have a block that the other lost.

        Usually: keys without the rank, or a lookup that asks one rank's store and speaks for both.
        """
        _need_ranks(bench)
        prompts = [bench.stem(), bench.stem()[: 2 * bench.chunk] + tokens(97, bench.block + 3)]
        for name in ("two ranks", "two ranks in another process", "two ranks with losses"):
            store = _RANKS
            if name.endswith("losses"):
                if not bench.subject.has_store:
                    return
                bench.end_session()
                store = f"{_RANKS}-losses"
                damage(bench.copy_of(_RANKS, store), "remove", every=2)
            session = bench.session(name, store=store, **_TWO)
            if name == "two ranks":
                bench.keep(session, prompts[:1])
            for prompt in prompts:
                bench.forget(session)
                (answer,) = bench.ask(session, [prompt])
                bench.compare(prompt, answer, f"with {name}, a prompt", **_TWO)
                if name == "two ranks":
                    expect(answer["cached"] >= bench.chunk, f"{answer['cached']} of {len(prompt)} tokens were found")

    def test_E36_another_number_of_ranks_is_right(self, bench: Bench) -> None:
        """Two ranks find nothing of what one has stored, or what is right for them.

        Why: the same tokens, model and type have other heads in each rank's blocks.

        Usually: keys without the number of ranks.
        """
        _need_ranks(bench)
        prompt = kept(bench)
        session = bench.session("ranks on one rank's store", store=STORE, **_TWO)
        (answer,) = bench.ask(session, [prompt])
        bench.compare(prompt, answer, "with two ranks on the store of one, a prompt", **_TWO)


def _need_ranks(bench: Bench) -> None:
    try:
        bench.own(bench.stem(), **_TWO)
    except RefusedError as error:
        raise NotApplicableError(f"without a connector, {error}") from error
