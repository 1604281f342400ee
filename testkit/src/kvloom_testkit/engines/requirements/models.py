"""Requirements of models whose KV is not K and V of each head."""

from __future__ import annotations

from typing import Any

from kvloom_testkit.engines.base import NotApplicableError, expect
from kvloom_testkit.engines.bench import Bench
from kvloom_testkit.engines.process import RefusedError
from kvloom_testkit.engines.prompts import tokens

WINDOW = 64
"""Tokens of the sliding windows of the kit's model."""
_SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {}, "latents": {"dtype": "bfloat16"}, "windows": {}, "states": {"mamba_cache_mode": "align"},
}  # fmt: skip
"""Arguments of the engine for each kind of model. vLLM has no latents in float32 on a processor."""


def of_kind(bench: Bench, kind: str) -> dict[str, Any]:
    """Arguments of the engine for a kind of model. Raises NotApplicableError if it needs no connector to refuse it."""
    llm = {"model": bench.model(kind=kind), **_SETTINGS[kind]}
    try:
        bench.own(bench.stem(), **llm)
    except RefusedError as error:
        raise NotApplicableError(f"without a connector, {error}") from error
    return llm


class Models:
    """Kinds of models."""

    def test_E29_latents_are_right(self, bench: Bench) -> None:
        """A model with multi-head latent attention is served: found again, and answered right.

        Why: its cache has one vector for each token and layer, and no V.

        Usually: half of each page taken for V, or the number of heads taken from the model's settings.
        """
        llm, prompt = of_kind(bench, "latents"), bench.stem()
        if not bench.own(prompt, bench.block, **llm)["cached"]:  # its kernels do not attend to KV of an earlier step
            raise NotApplicableError("vLLM has no prefix cache of its own for latents on this processor")
        session = bench.session("latents", store="latents", **llm)
        bench.keep(session, [prompt])
        (answer,) = bench.ask(session, [prompt])
        expect(answer["cached"] >= bench.chunk, f"{answer['cached']} of {len(prompt)} tokens were found")
        bench.compare(prompt, answer, "with latents, a prompt", after=prompt, **llm)
        for chunks in (1, 3):
            bench.forget(session)
            longer = prompt[: chunks * bench.chunk] + tokens(95 + chunks, bench.block + 3)
            (answer,) = bench.ask(session, [longer])
            bench.compare(longer, answer, "with latents, a prompt", after=prompt, **llm)

    def test_E30_windows_are_right(self, bench: Bench) -> None:
        """A model with sliding windows beside full attention is served: found again, and answered right.

        Why: its layers are in groups, each with a list of blocks of its own, and those behind a window are given back.

        Usually: the first group's blocks taken for all layers, or blocks that were given back stored as full ones.
        """
        llm, prompt = of_kind(bench, "windows"), bench.stem()
        bounds = (WINDOW, 2 * WINDOW)
        for turn in ("windows", "windows in another process"):
            session = bench.session(turn, store="windows", **llm)
            if turn == "windows":
                bench.keep(session, [prompt])
            for length in sorted({bound + more for bound in bounds for more in (-1, 0, 1)} | {len(prompt)}):
                bench.forget(session)
                asked = prompt[:length] + tokens(200 + length, 0 if length == len(prompt) else bench.block + 3)
                (answer,) = bench.ask(session, [asked])
                bench.compare(asked, answer, "with windows, a prompt", **llm)
                if length == len(prompt):
                    expect(answer["cached"] >= bench.chunk, f"{answer['cached']} of {length} tokens were found")

    def test_E31_states_are_right(self, bench: Bench) -> None:
        """A model with states, here of short convolutions, is served: found again, and answered right.

        Why: a state stands for all tokens up to one of them, and is of no use behind another.

        Usually: refused by vLLM, since the class is not declared `SupportsHMA`, or by the connector; or a block's state
        taken from where it was one block earlier or later.
        """
        llm, size = of_kind(bench, "states"), 2 * bench.chunk
        prompts = [tokens(300 + more, size + more) for more in (-1, 0, 1, bench.block)]
        for turn in ("states", "states in another process"):
            session = bench.session(turn, store="states", **llm)
            if turn == "states":
                bench.keep(session, prompts)
            for prompt in prompts:
                bench.forget(session)
                (answer,) = bench.ask(session, [prompt])
                bench.compare(prompt, answer, "with states, a prompt", after=prompt, **llm)
                least = (len(prompt) - 1) // bench.chunk * bench.chunk
                expect(answer["cached"] >= least, f"{answer['cached']} of {len(prompt)} tokens were found")
            bench.forget(session)
            other = prompts[-1][: bench.chunk] + tokens(310, size)
            (answer,) = bench.ask(session, [other])
            known = prompts[-1] if turn == "states" else other
            bench.compare(other, answer, "with states, a prompt that begins as another", after=known, **llm)
