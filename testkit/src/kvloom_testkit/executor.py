"""What a blend executor must do. See `ExecutorConformance`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from kvloom import BlendExecutor, BlendOutput, BlendRequest, BlendSession
from kvloom_testkit.conformance import Conformance
from kvloom_testkit.running import together
from kvloom_testkit.subjects import SPEC

Opened = Callable[[], BlendExecutor]
LAYERS, HIDDEN = SPEC.num_layers, SPEC.hidden_dim
BATCHES = ((40,), (1, 33, 7))
"""Tokens of each request of a batch."""


@dataclass(frozen=True)
class Batch:
    """What a model and a retriever hand to an executor, of random numbers."""

    request: BlendRequest
    retrieved: torch.Tensor
    """`[2, layers, tokens, hidden]`: K, rotated to the positions that the tokens have now, and V."""
    fresh: torch.Tensor
    """`[3, layers, tokens, hidden]`: Q, K and V as the model would compute them."""
    positions: torch.Tensor

    @property
    def starts(self) -> list[int]:
        return list(self.request.query_start_loc.tolist())


def batch_of(lengths: tuple[int, ...], *, seed: int = 0, valid: float = 0.7, dtype: torch.dtype | None = None) -> Batch:
    """A batch of requests of so many tokens each, of which the part `valid` was retrieved."""
    random = torch.Generator().manual_seed(seed)
    total, dtype = sum(lengths), SPEC.torch_dtype if dtype is None else dtype
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    mask = torch.rand(total, generator=random) < valid
    request = BlendRequest(torch.randint(0, 50_000, (total,), generator=random), starts, mask)
    retrieved = torch.randn(2, LAYERS, total, HIDDEN, generator=random).to(dtype)
    fresh = torch.randn(3, LAYERS, total, HIDDEN, generator=random).to(dtype)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(request, retrieved, fresh, positions)


@dataclass(frozen=True)
class Layer:
    """One call of `blend`: which tokens of the batch were handed on to it, and what came back."""

    layer: int
    handed_on: torch.Tensor
    """Places in the batch."""
    output: BlendOutput

    @property
    def selected(self) -> torch.Tensor:
        """Places in the batch of the tokens that go on."""
        return self.handed_on[self.output.local_indices]


def blended(session: BlendSession, batch: Batch) -> Iterator[Layer]:
    """Layer after layer, as a model does it: what one layer has selected is computed in the next."""
    going = torch.arange(len(batch.positions))
    for layer in range(LAYERS):
        k, v = batch.retrieved[:, layer]
        fresh_q, fresh_k, fresh_v = batch.fresh[:, layer, going]
        output = session.blend(
            layer, k, v, batch.request.valid_mask, batch.positions, fresh_q, fresh_k, fresh_v, batch.positions[going],
            batch.request.query_start_loc, 0,
        )  # fmt: skip
        step = Layer(layer, going, output)
        yield step
        going = step.selected


def run(executor: BlendExecutor, batch: Batch) -> list[Layer]:
    return list(blended(executor.begin(batch.request), batch))


def same(one: list[Layer], two: list[Layer]) -> bool:
    """Whether two blendings came to the same."""
    fields = ("q", "k", "v", "positions", "local_indices")
    return all(
        torch.equal(getattr(a.output, name), getattr(b.output, name))
        for a, b in zip(one, two, strict=True)
        for name in fields
    )


class ExecutorConformance(Conformance):
    """Requirements of a `BlendExecutor`.

    `make` is a function that makes a new executor for `kvloom_testkit.subjects.SPEC`. In these tests no token has moved
    since its KV was stored: what is done about the positional encoding shows elsewhere.
    """

    kind = "blend executor"
    contract = BlendExecutor

    @pytest.fixture(params=BATCHES, ids=str)
    def batch(self, request: pytest.FixtureRequest) -> Batch:
        return batch_of(request.param)

    def test_X01_keeps_shapes_and_dtypes(self, opened: Opened) -> None:
        """K and V of the output are as long as the batch, Q and the indices as long as the selection; dtypes stay.

        Why: attention reads the long K and V at the selected positions.

        Usually: K and V are cut to the selection too, or come back in float32.
        """
        for lengths in BATCHES:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                for step in run(opened(), batch_of(lengths, dtype=dtype)):
                    output, count = step.output, len(step.output.local_indices)
                    assert output.k.shape == output.v.shape == (sum(lengths), HIDDEN)
                    assert output.q.shape == (count, HIDDEN) and output.positions.shape == (count,)
                    assert output.q.dtype == output.k.dtype == output.v.dtype == dtype

    def test_X02_takes_invalid_tokens_fresh(self, opened: Opened, batch: Batch) -> None:
        """A token whose KV was not retrieved is selected in every layer.

        Why: there is nothing else to take: the retrieved KV is undefined there.

        Usually: the tokens with the largest deviation are chosen among all, and what is undefined may deviate little.
        """
        missing = (~batch.request.valid_mask).nonzero().flatten()
        for step in run(opened(), batch):
            assert torch.isin(missing, step.selected).all(), f"in layer {step.layer}"

    def test_X03_selected_tokens_have_fresh_kv(self, opened: Opened, batch: Batch) -> None:
        """At the places that were selected, K and V are those that the model has just computed.

        Why: they were selected because the retrieved ones are wrong there.

        Usually: indices into the batch and indices into what was handed on are taken for each other.
        """
        for step in run(opened(), batch):
            for name, plane in (("k", 1), ("v", 2)):
                got, want = getattr(step.output, name), batch.fresh[plane, step.layer]
                assert torch.equal(got[step.selected], want[step.selected]), f"{name} of layer {step.layer}"

    def test_X04_other_tokens_have_retrieved_kv(self, opened: Opened, batch: Batch) -> None:
        """Where a token was not selected, V is the retrieved one, and K too as long as the token has not moved.

        Why: that is what is reused.

        Usually: the blended tensors are kept, and written over, from one layer to the next.
        """
        for step in run(opened(), batch):
            rest = torch.ones(len(batch.positions), dtype=torch.bool)
            rest[step.selected] = False
            k, v = batch.retrieved[:, step.layer]
            assert torch.equal(step.output.v[rest], v[rest]), f"v of layer {step.layer}"
            torch.testing.assert_close(step.output.k[rest], k[rest], rtol=0.02, atol=0.02)

    def test_X05_q_and_positions_are_those_of_the_selection(self, opened: Opened, batch: Batch) -> None:
        """Q and positions are those of the tokens that `local_indices` selects from what was handed on, in that order.

        Why: the next layer computes just these, at these positions.

        Usually: one of the three is sorted, and the others are not.
        """
        for step in run(opened(), batch):
            assert torch.equal(step.output.q, batch.fresh[0, step.layer][step.selected])
            assert torch.equal(step.output.positions.cpu(), batch.positions[step.selected])

    def test_X06_leaves_its_arguments_as_they_are(self, opened: Opened, batch: Batch) -> None:
        """No tensor that is handed to `begin` or `blend` is changed.

        Why: the retrieved KV may be the cache itself, shared with other requests.

        Usually: fresh values are written into the retrieved tensors, which saves a copy.
        """
        tensors = (batch.retrieved, batch.fresh, batch.positions, *vars_of(batch.request))
        before = [tensor.clone() for tensor in tensors]
        run(opened(), batch)
        assert all(torch.equal(one, other) for one, other in zip(before, tensors, strict=True))

    def test_X07_the_selection_only_shrinks_and_stays_in_order(self, opened: Opened, batch: Batch) -> None:
        """What is selected in a layer was handed on to it, each token once, in the order of the batch.

        Why: of a token that was left out, later layers have no hidden state; and requests lie one behind the other.

        Usually: the indices of `topk`, which are not sorted.
        """
        for step in run(opened(), batch):
            local = step.output.local_indices
            assert (local >= 0).all() and (local < len(step.handed_on)).all()
            assert (local.diff() > 0).all(), f"in layer {step.layer}"

    def test_X08_says_where_each_request_starts(self, opened: Opened, batch: Batch) -> None:
        """`query_start_loc` of the output says where each request starts in Q; None where nothing was left out.

        Why: attention over a batch needs it.

        Usually: it is counted once, and not again in a layer that selects once more.
        """
        for step in run(opened(), batch):
            starts = step.output.query_start_loc
            if starts is None:
                assert len(step.output.local_indices) == len(step.handed_on), f"in layer {step.layer}"
                continue
            edges = torch.tensor(batch.starts)
            assert starts.tolist() == torch.searchsorted(step.selected, edges).tolist(), f"in layer {step.layer}"

    def test_X09_sessions_do_not_meet(self, opened: Opened) -> None:
        """Two sessions of one executor, taken in turn layer by layer, come to what each alone comes to.

        Why: an engine has many requests at once.

        Usually: what was selected is kept on the executor.
        """
        batches = [batch_of((40,), seed=1), batch_of((1, 33, 7), seed=2, valid=0.3)]
        alone = [run(opened(), batch) for batch in batches]
        executor = opened()
        turns = zip(*(blended(executor.begin(batch.request), batch) for batch in batches), strict=True)
        for number, steps in enumerate(zip(*turns, strict=True)):
            assert same(list(steps), alone[number])

    def test_X10_a_session_leaves_nothing_to_the_next(self, opened: Opened) -> None:
        """A session comes to the same whatever the executor has done before, and whether that was finished.

        Why: results that depend on who came before cannot be reproduced, and leak one request into another.

        Usually: a cache by layer is emptied at the last layer, which a request that was cut off never reaches.
        """
        batch, other = batch_of((1, 33, 7), seed=3), batch_of((40,), seed=4)
        want = run(opened(), batch)
        executor = opened()
        run(executor, other)
        assert same(run(executor, batch), want)
        next(blended(executor.begin(other.request), other))  # is cut off
        assert same(run(executor, batch), want)

    def test_X11_without_retrieved_kv_all_is_fresh(self, opened: Opened) -> None:
        """Where nothing was retrieved, everything is selected, in every layer.

        Why: a prompt that is not known is computed as it would be without blending.

        Usually: the share of tokens to be computed again is taken of all tokens.
        """
        batch = batch_of((40, 3), valid=0.0)
        for step in run(opened(), batch):
            assert len(step.selected) == 43
            assert torch.equal(step.output.k, batch.fresh[1, step.layer])
            assert torch.equal(step.output.v, batch.fresh[2, step.layer])

    def test_X12_the_last_token_of_each_request_goes_on(self, opened: Opened) -> None:
        """The last token of each request is selected in every layer, retrieved or not.

        Why: the next token is predicted from its hidden state, which nobody stores.

        Usually: a prompt of which all was retrieved was not thought of.
        """
        for valid in (0.7, 1.0):
            batch = batch_of((1, 33, 7), valid=valid)
            lasts = torch.tensor(batch.starts[1:]) - 1
            for step in run(opened(), batch):
                assert torch.isin(lasts, step.selected).all(), f"in layer {step.layer}"

    def test_X13_undefined_kv_reaches_nobody(self, opened: Opened, batch: Batch) -> None:
        """What stands in the retrieved KV of tokens that are not valid, be it NaN, has no influence at all.

        Why: it is memory that nobody has written.

        Usually: the blend is a sum of products with a mask, and NaN times zero is NaN; or a norm is over all tokens.
        """
        want = run(opened(), batch)
        undefined = batch.retrieved.clone()
        undefined[:, :, ~batch.request.valid_mask] = float("nan")
        assert same(run(opened(), replace(batch, retrieved=undefined)), want)

    def test_X14_threads_may_blend_at_once(self, opened: Opened) -> None:
        """Sessions of one executor may run on several threads at once.

        Why: an engine may have several workers in one process.

        Usually: scratch memory that belongs to the executor.
        """
        executor, batches = opened(), [batch_of((60, 5), seed=seed) for seed in range(4)]
        want = [run(opened(), batch) for batch in batches]
        got: list[list[list[Layer]]] = [[] for _ in batches]
        together(*(lambda n=n: got[n].extend(run(executor, batches[n]) for _ in range(5)) for n in range(4)))  # type: ignore[misc]
        assert all(same(one, want[number]) for number, several in enumerate(got) for one in several)

    def test_X15_closing_twice_is_fine(self, make: Opened) -> None:
        """`close` may be called twice, and on an executor that has blended nothing.

        Why: an engine that fails to open closes what it has made so far, and its owner closes it once more.

        Usually: the second call closes what is None by then.
        """
        executor = make()
        executor.close()
        executor.close()


def vars_of(request: BlendRequest) -> tuple[torch.Tensor, ...]:
    return request.input_tokens, request.query_start_loc, request.valid_mask
