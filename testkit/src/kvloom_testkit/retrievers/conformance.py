"""Requirements of blend retrievers. See `RetrieverConformance`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch

from kvloom import BlendRetriever, BlendRetrieverResult
from kvloom_testkit.conformance import Conformance
from kvloom_testkit.process_state import left_as_it_is
from kvloom_testkit.retrievers.texts import HIDDEN, LAYERS, LENGTH, kv_of, near_texts, starts_of, text
from kvloom_testkit.running import together
from kvloom_testkit.subjects import SPEC


class Library(Protocol):
    """A retriever, and a way to fill its store. All those of one test share their content."""

    retriever: BlendRetriever

    def add(self, tokens: torch.Tensor, kv: torch.Tensor) -> None:
        """Store a text whose tokens stood at positions 0, 1, ...; it can be retrieved on return.

        tokens: 1-D. kv: `[2, layers, tokens, hidden]`.
        """


Opened = Callable[[], Library]


def ask(library: Library, *texts: torch.Tensor) -> list[BlendRetrieverResult]:
    """All layers of a batch, a request each text."""
    task = library.retriever.new_request(torch.cat(texts), starts_of(*texts))
    return [task.result(layer) for layer in range(LAYERS)]


def right(result: BlendRetrieverResult, layer: int, prompt: torch.Tensor, *known: torch.Tensor) -> int:
    """Number of retrieved tokens of one request; fails if one of them differs from the KV known at its position."""
    places = result.valid_mask.nonzero().flatten().cpu()
    if not len(places):
        return 0
    assert result.k is not None and result.v is not None, "valid tokens without KV"
    positions, got = result.original_positions.cpu().long()[places], torch.stack([result.k, result.v]).cpu()[:, places]
    own = torch.zeros(len(places), dtype=torch.bool)
    for one in known:
        at = positions.clamp(0, len(one) - 1)
        values = kv_of(one)[:, layer, at]
        assert got.shape == values.shape and got.dtype is values.dtype, "KV of another shape or dtype"
        own |= (at == positions) & (one[at] == prompt[places]) & (got == values).all(-1).all(0)
    others = places[~own].tolist()
    assert not others, f"token {others[0]} of layer {layer} has another's KV"
    return len(places)


class RetrieverConformance(Conformance):
    """Requirements of a `BlendRetriever`.

    `make` is a function that makes a `Library` for `kvloom_testkit.subjects.SPEC`: a retriever and a way to fill it. A
    stored text of 128 tokens must be found in a request that is just that text, or has it between separators; set
    `separator` to the tokens that must stand between texts.
    """

    kind = "blend retriever"
    contract = BlendRetriever
    needs_harness = True
    yours = Conformance.yours | {"separator"}
    separator: ClassVar[tuple[int, ...]] = ()
    """Tokens that stand between texts, for retrievers that look for them."""

    @staticmethod
    def component_of(made: Any) -> Any:
        return made.retriever

    def prompt(self, *texts: torch.Tensor) -> torch.Tensor:
        """Texts, one after the other, with separators between them."""
        between = torch.tensor(self.separator, dtype=torch.long)
        parts = [part for one in texts for part in (one, between)]
        return torch.cat(parts[:-1])

    def test_R01_results_have_their_shapes(self, opened: Opened) -> None:
        """K and V are `[tokens, hidden]`, the mask is bool, on the CPU, positions int32 or int64; all cover the batch.

        Why: the executor indexes all of them by the places of the batch.

        Usually: only the found tokens are returned, heads have a dimension of their own, or positions are stored in too
        few bytes.
        """
        library = opened()
        library.add(text(1), kv_of(text(1)))
        prompt = self.prompt(text(1), text(2))
        for result in ask(library, prompt):
            assert result.valid_mask.shape == result.original_positions.shape == prompt.shape
            assert result.valid_mask.dtype == torch.bool and result.valid_mask.device.type == "cpu"
            assert result.original_positions.dtype in (torch.int32, torch.int64)
            for plane in (result.k, result.v):
                assert plane is not None and plane.shape == (len(prompt), HIDDEN) and plane.dtype == SPEC.torch_dtype

    def test_R02_finds_a_text_in_another_context(self, opened: Opened) -> None:
        """A stored text is found in a request behind another text of any length, not only at the beginning.

        Why: this is the purpose of blending; prefixes are found without it.

        Usually: keys depend on all earlier tokens, or only the beginnings of blocks are examined.
        """
        library = opened()
        library.add(text(1), kv_of(text(1)))
        behind = [self.prompt(text(2, length), text(1)) for length in (1, 37, LENGTH)]
        for prompt in (text(1), *behind, self.prompt(text(2), text(1), text(3))):
            for layer, result in enumerate(ask(library, prompt)):
                assert right(result, layer, prompt, text(1)) >= LENGTH // 2, f"of {len(prompt)} tokens"

    def test_R03_gives_every_token_its_own_kv(self, opened: Opened) -> None:
        """A valid token has the K and V that were stored for this token in this layer.

        A token never gets the KV of another token, also in requests that nearly equal a known text.

        Why: another token's KV gives a wrong answer that nobody notices.

        Usually: an offset in the text is used in the request; K and V, or layers, are swapped; or a text is matched by
        some of its tokens, by their sum, in any order, or by ids cut to a vocabulary.
        """
        library = opened()
        texts = [text(seed) for seed in range(4)]
        for one in texts[:3]:
            library.add(one, kv_of(one))
        prompt = self.prompt(texts[2], texts[3], texts[0])
        for layer, result in enumerate(ask(library, prompt)):
            right(result, layer, prompt, *texts[:3])
        known = texts[0]
        for changed, near in near_texts(known).items():
            prompts = [self.prompt(one) for one in near]
            (result, *_), prompt = ask(library, *prompts), torch.cat(prompts)
            places = result.valid_mask.nonzero().flatten()
            stood = result.original_positions[places].cpu().long()
            assert bool(((stood >= 0) & (stood < len(known))).all()), f"{changed}: of places that the text has not"
            wrong = places[known[stood] != prompt[places]]
            assert not len(wrong), f"{changed}: {len(wrong)} tokens are valid with KV of other tokens"

    def test_R04_nothing_known_is_nothing_valid(self, opened: Opened) -> None:
        """No token is valid in a request of unknown tokens.

        Why: invalid tokens are computed; valid ones are trusted.

        Usually: the mask defaults to True, or to the last request's.
        """
        library = opened()
        for _ in range(2):
            for result in ask(library, text(5)):
                assert not result.valid_mask.any()
            library.add(text(6), kv_of(text(6)))

    def test_R05_leaves_its_arguments_as_they_are(self, opened: Opened) -> None:
        """Neither the tokens nor `query_start_loc` are changed.

        Why: they belong to the engine.

        Usually: separators are cut out in place.
        """
        library, prompt = opened(), self.prompt(text(1), text(2))
        library.add(text(1), kv_of(text(1)))
        tokens, starts = prompt.clone(), starts_of(prompt)
        library.retriever.new_request(tokens, starts).result(0)
        assert torch.equal(tokens, prompt) and torch.equal(starts, starts_of(prompt))

    def test_R06_layers_may_be_asked_in_any_order_and_again(self, opened: Opened) -> None:
        """`result` returns the same for a layer, in any order of calls, and when called again.

        Why: an engine that overlaps loading and computing asks ahead; one that is preempted asks again.

        Usually: an iterator, or a buffer that the next layer is read into.
        """
        library, prompt = opened(), text(1)
        library.add(prompt, kv_of(prompt))
        task = library.retriever.new_request(prompt, starts_of(prompt))
        results = {layer: task.result(layer) for layer in reversed(range(LAYERS))}
        for layer in range(LAYERS):
            assert right(task.result(layer), layer, prompt, prompt) == right(results[layer], layer, prompt, prompt) > 0

    def test_R07_requests_of_a_batch_do_not_meet(self, opened: Opened) -> None:
        """A text that spans two neighbouring requests is found in neither.

        Why: tokens of different requests are adjacent only by accident.

        Usually: the batch is searched as if it were one sequence.
        """
        library, whole = opened(), text(1)
        library.add(whole, kv_of(whole))
        left, middle = whole[: LENGTH // 2 - 3], whole[LENGTH // 2 - 3 :]
        alone = [int(ask(library, one)[0].valid_mask.sum()) for one in (left, middle)]
        together_ = ask(library, left, middle)[0].valid_mask
        assert [int(together_[: len(left)].sum()), int(together_[len(left) :].sum())] == alone

    def test_R08_says_where_tokens_stood(self, opened: Opened) -> None:
        """`original_positions` has the place of a token in its stored text, and 0 if it is not valid.

        Why: K was rotated to that place, and must be rotated from there to the present one.

        Usually: the positions of the request.
        """
        library = opened()
        library.add(text(1), kv_of(text(1)))
        prompt = self.prompt(text(2), text(1))
        result = ask(library, prompt)[0]
        begin = len(prompt) - LENGTH
        places = result.valid_mask.nonzero().flatten()
        assert torch.equal(result.original_positions[places].cpu().long(), places - begin)
        assert not result.original_positions[~result.valid_mask].any()

    def test_R09_several_requests_at_once(self, opened: Opened) -> None:
        """Requests may be under way at the same time, on several threads, and each gets its own.

        Why: an engine prepares the next batch while one is computed.

        Usually: the request is kept on the retriever.
        """
        library = opened()
        texts = [text(seed) for seed in range(4)]
        for one in texts:
            library.add(one, kv_of(one))
        tasks = [library.retriever.new_request(one, starts_of(one)) for one in texts]

        def check(number: int) -> None:
            for layer in range(LAYERS):
                assert right(tasks[number].result(layer), layer, texts[number], texts[number]) > 0
                assert right(ask(library, texts[number])[layer], layer, texts[number], texts[number]) > 0

        together(*(lambda number=number: check(number) for number in range(len(texts))))  # type: ignore[misc]

    def test_R10_a_result_stays_as_it_is(self, opened: Opened) -> None:
        """A result does not change after later requests, or when texts are added.

        Why: it is read while the next layers and requests are being fetched.

        Usually: one buffer for all results.
        """
        library = opened()
        for seed in (1, 2):
            library.add(text(seed), kv_of(text(seed)))
        results = ask(library, text(1))
        ask(library, text(2))
        library.add(text(3), kv_of(text(3)))
        ask(library, text(3))
        assert all(right(result, layer, text(1), text(1)) > 0 for layer, result in enumerate(results))

    def test_R11_asking_for_what_nobody_collects_is_fine(self, opened: Opened) -> None:
        """A task whose results are not collected, or only in part, does no harm.

        Why: requests are cancelled.

        Usually: a bounded number of tasks, each given back with its last layer.
        """
        library = opened()
        library.add(text(1), kv_of(text(1)))
        for _ in range(25):
            library.retriever.new_request(text(1), starts_of(text(1)))
            library.retriever.new_request(text(1), starts_of(text(1))).result(0)
        assert right(ask(library, text(1))[0], 0, text(1), text(1)) > 0

    def test_R12_closing_twice_is_fine(self, make: Opened) -> None:
        """`close` may be called twice, also while a task is under way.

        Why: an engine that fails to open closes what it has made so far, and its owner closes it once more.

        Usually: the second call closes a resource that is None by then.
        """
        library = make()
        library.retriever.new_request(text(1), starts_of(text(1)))
        library.retriever.close()
        library.retriever.close()

    def test_R13_what_is_valid_in_one_layer_is_valid_in_all(self, opened: Opened) -> None:
        """The mask, and the positions, of one task are the same in every layer, also if texts are added meanwhile.

        Why: a token that was skipped in one layer has no hidden state in the next, and cannot be computed there.

        Usually: each layer is looked up only when it is requested.
        """
        library = opened()
        library.add(text(1), kv_of(text(1)))
        prompt = self.prompt(text(1), text(2))
        task = library.retriever.new_request(prompt, starts_of(prompt))
        first = task.result(0)
        mask, positions = first.valid_mask.clone(), first.original_positions.clone()
        library.add(text(2), kv_of(text(2)))
        for layer in range(LAYERS):
            result = task.result(layer)
            assert torch.equal(result.valid_mask, mask), f"layer {layer} has another mask than layer 0"
            assert torch.equal(result.original_positions, positions), f"layer {layer} has other positions than layer 0"

    def test_R14_leaves_the_process_as_it_is(self, make: Opened) -> None:
        """Retrieving changes neither logging, signals and warnings, nor random numbers, nor the settings of torch.

        Why: it runs beside a model, which depends on these settings.

        Usually: gradients are switched off for good, or the number of torch's threads is set.
        """
        with left_as_it_is():
            library = make()
            library.add(text(1), kv_of(text(1)))
            ask(library, text(1))
            library.retriever.close()
