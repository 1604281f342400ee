"""Requirements of models whose KV is not K and V of each head."""

from __future__ import annotations

from kvloom_testkit.engines.bench import Bench, NotApplicableError, expect
from kvloom_testkit.engines.process import RefusedError
from kvloom_testkit.engines.prompts import tokens

_LATENT_TYPE = "bfloat16"
"""vLLM has no float32 for them on a processor."""


class Models:
    """Kinds of models."""

    def test_E29_latents_are_right(self, bench: Bench) -> None:
        """A model with multi-head latent attention is served: found again, and answered right.

        Why: its cache has one vector for each token and layer, and no V.

        Usually: half of each page taken for V, or the number of heads taken from the model's settings.
        """
        llm = {"model": bench.model(kind="latents"), "dtype": _LATENT_TYPE}
        prompt = bench.stem()
        try:
            bench.own(prompt, **llm)
        except RefusedError as error:
            raise NotApplicableError(f"without a connector, {error}") from error
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
