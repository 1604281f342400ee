"""Requirements of blend executors. See `ExecutorConformance`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvloom import BlendExecutor
from kvloom_testkit.conformance import Conformance
from kvloom_testkit.executors.sessions import HIDDEN, Batch, Layer, batch_of, blended, run, same
from kvloom_testkit.process_state import left_as_it_is
from kvloom_testkit.running import together

Opened = Callable[[], BlendExecutor]
BATCHES = ((40,), (1, 33, 7))
"""Tokens of each request of a batch."""


class ExecutorConformance(Conformance):
    """Requirements of a `BlendExecutor`.

    `make` is a function that makes a new executor for `kvloom_testkit.subjects.SPEC`. In these tests no token has moved
    since its KV was stored: positional encoding is tested elsewhere.
    """

    kind = "blend executor"
    contract = BlendExecutor

    @pytest.fixture(params=BATCHES, ids=str)
    def batch(self, request: pytest.FixtureRequest) -> Batch:
        return batch_of(request.param)

    def test_X01_keeps_shapes_and_dtypes(self, opened: Opened) -> None:
        """K and V of the output are as long as the batch, Q and the indices as long as the selection; dtypes do not
        change. Positions and `query_start_loc` keep their dtype, `local_indices` are int64.

        Why: attention reads the long K and V at the selected positions, and kernels need their dtypes.

        Usually: K and V are cut to the selection too, or come back in float32; Q is taken to be as wide as K; or
        positions went through a float, in which large ones are no longer exact.
        """
        for lengths in BATCHES:
            for dtype, indices, q_heads in (
                (torch.bfloat16, torch.int64, 1), (torch.float16, torch.int32, 4), (torch.float32, torch.int64, 2),
            ):  # fmt: skip
                batch = batch_of(lengths, dtype=dtype, indices=indices, q_heads=q_heads)
                for step in run(opened(), batch):
                    output, count = step.output, len(step.output.local_indices)
                    assert output.k.shape == output.v.shape == (sum(lengths), HIDDEN)
                    assert output.q.shape == (count, HIDDEN * q_heads) and output.positions.shape == (count,)
                    assert output.q.dtype == output.k.dtype == output.v.dtype == dtype
                    assert output.positions.dtype == indices, f"positions of {output.positions.dtype}, not {indices}"
                    assert output.local_indices.dtype == torch.int64, f"indices of {output.local_indices.dtype}"
                    starts = output.query_start_loc
                    assert starts is None or starts.dtype == indices, "query_start_loc is of another dtype"

    def test_X02_takes_invalid_tokens_fresh(self, opened: Opened, batch: Batch) -> None:
        """A token whose KV was not retrieved is selected in every layer.

        Why: there is no other KV: the retrieved one is undefined there.

        Usually: the tokens with the largest deviation are chosen among all, and undefined KV may deviate little.
        """
        missing = (~batch.request.valid_mask).nonzero().flatten()
        for step in run(opened(), batch):
            assert torch.isin(missing, step.selected).all(), f"in layer {step.layer}"

    def test_X03_selected_tokens_have_fresh_kv(self, opened: Opened, batch: Batch) -> None:
        """Selected tokens have the K and V that the model has just computed.

        Why: they were selected because the retrieved ones are wrong there.

        Usually: indices into the batch are confused with indices into the tokens that reached the layer.
        """
        for step in run(opened(), batch):
            for name, plane in (("k", 0), ("v", 1)):
                got, want = getattr(step.output, name), batch.fresh[plane, step.layer]
                assert torch.equal(got[step.selected], want[step.selected]), f"{name} of layer {step.layer}"

    def test_X04_other_tokens_have_retrieved_kv(self, opened: Opened, batch: Batch) -> None:
        """A token that was not selected has the retrieved V, and the retrieved K unless it has moved; or the fresh
        ones, if it reached this layer.

        Why: no other KV of the token is known.

        Usually: the blended tensors are kept and overwritten from one layer to the next.
        """
        for step in run(opened(), batch):
            rest = torch.ones(len(batch.positions), dtype=torch.bool)
            rest[step.selected] = False
            known = torch.zeros_like(rest)
            known[step.handed_on] = True
            for name, plane, within in (("k", 0, 0.02), ("v", 1, 0.0)):
                got = getattr(step.output, name)
                retrieved, fresh = batch.retrieved[plane, step.layer], batch.fresh[plane, step.layer]
                reused = torch.isclose(got, retrieved, rtol=within, atol=within).all(dim=1)
                wrong = rest & ~reused & ~(known & (got == fresh).all(dim=1))
                assert not wrong.any(), f"{name} of layer {step.layer}, tokens {wrong.nonzero().flatten().tolist()}"

    def test_X05_q_and_positions_are_those_of_the_selection(self, opened: Opened, batch: Batch) -> None:
        """Q and positions belong to the tokens that `local_indices` selects, in that order.

        Why: the next layer computes exactly these tokens, at these positions.

        Usually: one of the three is sorted, and the others are not.
        """
        for step in run(opened(), batch):
            assert torch.equal(step.output.q, batch.fresh_q[step.layer][step.selected])
            assert torch.equal(step.output.positions.cpu(), batch.positions[step.selected])

    def test_X06_leaves_its_arguments_as_they_are(self, opened: Opened, batch: Batch) -> None:
        """No tensor passed to `begin` or `blend` is changed.

        Why: the retrieved KV may be the cache itself, shared with other requests.

        Usually: fresh values are written into the retrieved tensors, which saves a copy.
        """
        before = [tensor.clone() for tensor in batch.tensors]
        run(opened(), batch)
        assert all(map(torch.equal, before, batch.tensors))

    def test_X07_the_selection_only_shrinks_and_stays_in_order(self, opened: Opened, batch: Batch) -> None:
        """The tokens selected in a layer are some of those that reached it, each once, in the order of the batch.

        Why: later layers have no hidden state of a token that was left out, and requests lie one behind the other.

        Usually: the indices of `topk`, which are not sorted.
        """
        for step in run(opened(), batch):
            local = step.output.local_indices
            assert (local >= 0).all() and (local < len(step.handed_on)).all()
            assert (local.diff() > 0).all(), f"in layer {step.layer}"

    def test_X08_says_where_each_request_starts(self, opened: Opened, batch: Batch) -> None:
        """`query_start_loc` of the output has each request's start in Q; None if no token was left out.

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
        """Two sessions of one executor, alternating layer by layer, give the same results as each alone.

        Why: an engine has many requests at once.

        Usually: the selection is kept on the executor.
        """
        batches = [batch_of((40,), seed=1), batch_of((1, 33, 7), seed=2, valid=0.3)]
        alone = [run(opened(), batch) for batch in batches]
        executor = opened()
        turns = zip(*(blended(executor.begin(batch.request), batch) for batch in batches), strict=True)
        for number, steps in enumerate(zip(*turns, strict=True)):
            assert same(list(steps), alone[number])

    def test_X10_a_session_leaves_nothing_to_the_next(self, opened: Opened) -> None:
        """A session's results do not depend on earlier sessions, finished or not.

        Why: results that depend on earlier requests cannot be reproduced, and leak one request into another.

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
        """If nothing was retrieved, every token is selected in every layer.

        Why: an unknown prompt is computed as without blending.

        Usually: the share of tokens to compute again is applied to all tokens.
        """
        batch = batch_of((40, 3), valid=0.0)
        for step in run(opened(), batch):
            assert len(step.selected) == 43
            assert torch.equal(step.output.k, batch.fresh[0, step.layer])
            assert torch.equal(step.output.v, batch.fresh[1, step.layer])

    def test_X12_the_last_token_of_each_request_goes_on(self, opened: Opened) -> None:
        """The last token of each request is selected in every layer, retrieved or not.

        Why: the next token is predicted from its hidden state, which is not stored.

        Usually: a fully retrieved prompt was not considered.
        """
        for valid in (0.7, 1.0):
            batch = batch_of((1, 33, 7), valid=valid)
            lasts = torch.tensor(batch.starts[1:]) - 1
            for step in run(opened(), batch):
                assert torch.isin(lasts, step.selected).all(), f"in layer {step.layer}"

    def test_X13_undefined_kv_reaches_nobody(self, opened: Opened, batch: Batch) -> None:
        """The retrieved KV of tokens that are not valid, even NaN, has no influence.

        Why: it is uninitialised memory.

        Usually: the blend is a sum of products with a mask, and NaN times zero is NaN; or a norm covers all tokens.
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

        Usually: the second call closes a resource that is None by then.
        """
        executor = make()
        executor.close()
        executor.close()

    def test_X16_the_token_dimension_counts_from_either_end(self, opened: Opened, batch: Batch) -> None:
        """With `token_dim` -2 the results are the same as with 0.

        Why: with two dimensions they name the same one, and callers use either.

        Usually: an index is built by comparing the numbers of dimensions with `token_dim`, and selects everything.
        """
        want = run(opened(), batch)
        assert same(run(opened(), batch, token_dim=-2), want), "it comes to something else with -2"

    def test_X17_leaves_the_process_as_it_is(self, make: Opened, batch: Batch) -> None:
        """Blending changes neither logging, signals and warnings, nor random numbers, nor the settings of torch.

        Why: it runs in the middle of a model, which depends on these settings.

        Usually: gradients are switched off for good, a default dtype is set, or a seed.
        """
        with left_as_it_is():
            executor = make()
            run(executor, batch)
            executor.close()

    def test_X18_a_plan_is_kept_to(self, opened: Opened, batch: Batch) -> None:
        """`plan` returns None, or a mask that has at least the invalid tokens and the last one of each request. The
        first layer then receives these tokens; they come out fresh, and all others as they were retrieved.

        Why: an engine that calls it computes no other token, in any layer.

        Usually: the first layer takes its tokens for the whole batch.
        """
        for valid in (0.0, 0.7, 1.0):
            some = batch_of(tuple(torch.tensor(batch.starts).diff().tolist()), valid=valid)
            session = opened().begin(some.request)
            planned = session.plan()
            if planned is None:
                continue
            assert planned.dtype == torch.bool and planned.shape == some.positions.shape
            needed = ~some.request.valid_mask
            needed[torch.tensor(some.starts[1:]) - 1] = True
            assert not (needed & ~planned).any(), "a token that must be computed is not planned"
            for step in blended(session, some, planned=planned):
                for plane, got in enumerate((step.output.k, step.output.v)):
                    fresh, retrieved = some.fresh[plane, step.layer], some.retrieved[plane, step.layer]
                    assert torch.equal(got[step.selected], fresh[step.selected]), f"in layer {step.layer}"
                    assert torch.isclose(got[~planned], retrieved[~planned], rtol=0.02, atol=0.02).all()
                assert bool(needed[step.selected].sum() == needed.sum()), f"in layer {step.layer}"
