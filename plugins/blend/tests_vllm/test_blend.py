"""Documents that were seen in another order: vLLM answers with their KV, blended, and computes the last token only."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SEPARATOR, Run, settings, tokens
from warm import Warm

DOCUMENTS = [tokens(1, 150), tokens(2, 97), tokens(3, 210)]


def prompt(order: list[int], seed: int = 9) -> list[int]:
    """The documents in an order of their own, and a question."""
    documents = [token for number in order for token in [*DOCUMENTS[number], SEPARATOR]]
    return [0, SEPARATOR, *documents, *tokens(seed, 20)]


PROMPT, OTHER = prompt([2, 0, 1]), prompt([1, 2], seed=8)
STORED = {len(PROMPT): 457, len(OTHER): 307}


class Twin:
    """A transformers model that remembers the documents, in this process."""

    def __init__(
        self, model: Path, config: dict[str, Any], *, dtype: str = "float32", salt: str | None = None,
        bounds: Any = (None, None),
    ) -> None:  # fmt: skip
        from transformers import AutoModelForCausalLM

        from kvloom_blend import blended

        with blended(AutoModelForCausalLM.from_pretrained(model, dtype=dtype), config) as self.blended:
            for document in DOCUMENTS:
                assert self.blended.remember(torch.tensor(document), salt=salt) == len(document)
            self.answers = [
                self._answer(one, at, salt) for one, at in zip((PROMPT, OTHER), bounds, strict=True)
            ]  # fmt: skip

    def _answer(self, prompt: list[int], bounds: Any, salt: str | None) -> tuple[list[int], float]:
        """Greedy tokens, and the share of rows that were computed for them."""
        ids = torch.tensor(prompt)
        found = self.blended.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None, salt=salt,
            boundaries=bounds, store=False,
        )  # fmt: skip
        assert self.blended.last is not None
        return found[0, len(prompt) :].tolist(), self.blended.last.computed_share


def generate(*prompts: list[int], **more: Any) -> dict[str, Any]:
    return {"generate": {"prompts": list(prompts or (PROMPT, OTHER)), **more}}


def answers(found: list[Any]) -> list[list[int]]:
    return [one["tokens"] for one in found]


@pytest.fixture(scope="session")
def own(warm: Warm, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM's answers without a connector; asked once, however many processes test."""
    folder = tmp_path_factory.getbasetemp().parent / "kvloom-blend-own"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "answers.json").exists():
            (found,) = Run(warm, tiny, folder)(generate())
            (folder / "answers.json").write_text(json.dumps(answers(found)))
    return json.loads((folder / "answers.json").read_text())


def blobs(folder: Path) -> int:
    return sum(1 for path in folder.rglob("[0-9]*-*") if path.is_file())


def test_documents_in_another_order(run: Run, tiny: Path, tmp_path: Path, own: list[list[int]]) -> None:
    config = settings(tmp_path / "kv", "cacheblend", recompute_ratio=0.15)
    twin = Twin(tiny, config, salt="tenant")
    before = blobs(tmp_path / "kv")
    done = run(
        {"watch": {}}, generate(salt="tenant"), {"seen": {}}, {"metrics": {}},
        generate(salt="tenant", together=True), {"seen": {}},
        generate(PROMPT, salt="somebody else"), generate(PROMPT), {"seen": {}},
        generate(PROMPT, salt="tenant", params={"kvloom_blend": False}),
        generate(PROMPT, salt="tenant", prompt_logprobs=1), generate(PROMPT[:40], salt="tenant"), {"seen": {}},
        {"abort_while_blending": {"prompt": PROMPT, "salt": "tenant"}}, generate(salt="tenant"), {"usage": {}},
        config=config,
    )  # fmt: skip
    _, found, seen, metrics, together, again, stranger, nobody, unseen, plain, logprobs, short, still, *rest = done
    expected = [tokens for tokens, _ in twin.answers]
    assert answers(found) == expected, "vLLM goes on from the same KV as the twin does"
    assert expected[0] != own[0] and expected[1] != own[1], "which is not what vLLM would compute"
    assert [one["cached"] for one in found] == [len(PROMPT) - 1, len(OTHER) - 1], "vLLM computed the last token"
    assert seen == [[0, STORED[len(one)], share] for one, (_, share) in zip((PROMPT, OTHER), twin.answers, strict=True)]
    assert all(share < 0.5 for _, _, share in seen), "rows of layers that the twin computed"
    assert metrics["vllm:external_prefix_cache_hits"] == len(PROMPT) + len(OTHER) - 2
    assert answers(together) == expected and sorted(again) == sorted(seen)
    # Whose documents they are not, who does not want it, and what cannot have it: vLLM's own.
    assert answers(stranger) == answers(nobody) == answers(plain) == answers(logprobs) == [own[0]]
    assert unseen == still == [] and short[0]["cached"] == 0
    aborted, afterwards, usage = rest
    assert aborted == {"waiting": True, "left": 0, "usage": 0.0}
    assert answers(afterwards) == expected and usage == 0
    assert blobs(tmp_path / "kv") == before, "nothing that was blended is kept"


def test_what_is_computed_in_full_is_what_vllm_computes(run: Run, tmp_path: Path, own: list[list[int]]) -> None:
    """Remembered by the engine that serves, in memory that only it has."""
    config = settings(tmp_path / "kv", "full")
    config["tiers"] = config["tiers"][:1]
    before, kept, _, found, seen = run(
        generate(PROMPT), {"remember": {"passages": DOCUMENTS}}, {"watch": {}}, generate(), {"seen": {}}, config=config
    )
    assert before[0]["cached"] == 0 and answers(before) == own[:1]
    assert kept == [150, 97, 210]
    assert answers(found) == own
    assert [one["cached"] for one in found] == [len(PROMPT) - 1, len(OTHER) - 1]
    # Of the last layer no more than K and V is computed, but for the last token.
    assert [one[:2] for one in seen] == [[0, 457], [0, 307]] and all(share > 0.75 for *_, share in seen)


def test_every_failure_ends_in_vllms_own_prefill(run: Run, tmp_path: Path, own: list[list[int]]) -> None:
    config = settings(tmp_path / "kv", "none")
    _, blended, *failed, usage = run(
        {"remember": {"passages": DOCUMENTS}}, generate(),
        {"break_twin": {"how": "lost"}}, generate(PROMPT),
        {"break_twin": {"how": "raises"}}, generate(together=True),
        {"break_twin": {"how": "late"}}, generate(PROMPT),
        {"reset": {}}, generate(PROMPT), {"usage": {}},
        config=config,
    )  # fmt: skip
    lost, raised, late, reset = failed[1::2]
    assert answers(blended) != own
    assert answers(lost) == answers(late) == answers(reset) == own[:1]
    assert answers(raised) == own
    assert {one["reason"] for one in (*lost, *raised, *late, *reset)} == {"length"}
    assert usage == 0


def test_in_another_process_in_bfloat16_where_the_client_says_what_is_a_passage(
    run: Run, tiny: Path, tmp_path: Path
) -> None:
    """`vllm serve` has its worker in a process of its own; here with smaller blocks, and another kernel."""
    config = settings(
        tmp_path / "kv", "cacheblend", recompute_ratio=0.15, retriever={"type": "explicit", "lead": [0]}
    )  # fmt: skip
    bounds = [[2, 212, 213, 363, 364, 461], [2, 99, 100, 310]]
    twin = Twin(tiny, config, dtype="bfloat16", bounds=bounds)
    found = run(
        *(generate(one, params={"kvloom_boundaries": at}) for one, at in zip((PROMPT, OTHER), bounds, strict=True)),
        config=config, dtype="bfloat16", block_size=32, distributed_executor_backend="mp",
        env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )  # fmt: skip
    assert [one[0]["cached"] for one in found] == [len(PROMPT) - 1, len(OTHER) - 1]
    # Then come ties, in bfloat16. By itself, vLLM differs in the first token of one and the second of the other.
    assert [one[0]["tokens"][:3] for one in found] == [tokens[:3] for tokens, _ in twin.answers]
