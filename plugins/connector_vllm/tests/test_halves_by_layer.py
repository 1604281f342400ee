"""A step that computes a layer while the next ones are being loaded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from halves_support import LAYERS, MEMORY, PROMPT, disk
from vllm_fakes import BLOCK, FakeRequest

from kvloom_connector_vllm.paged.layers import LayerEvents

BY_LAYER = {"asynchronous": False, "by_layer": True}


@pytest.mark.parametrize("layers", [range(LAYERS), [None]], ids=["each", "one of another name"])
def test_a_layer_is_there_once_it_was_waited_for(pretended: Any, layers: Any) -> None:
    """And the next one need not be, when the first is computed."""
    one = pretended(tiers=[MEMORY], **BY_LAYER)
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    request, table, seen = FakeRequest("b", PROMPT[:]), range(8, 16), []
    go_on, there = threading.Event(), LayerEvents.there

    def slow(self: LayerEvents, *given: Any) -> None:
        there(self, *given)
        if len(layers) > 1:
            assert go_on.wait(20), "the second layer was waited for before the first was computed"

    def see(layer: int | None) -> None:
        go_on.set()
        for each in range(LAYERS) if layer is None else [layer]:
            pages = one.memory[0][each]
            assert all(torch.equal(pages[table[block]], one.page(request, block, each, 0)) for block in range(6))
            seen.append(each)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerEvents, "there", slow)
        tokens = one.matched(request)
        one.scheduler.load(request, [table], tokens)
        one.layers, one.see_layer = layers, see
        one.step()
    assert tokens == 24 and seen == [*range(LAYERS)] and not one.failed


def test_a_layer_without_a_wait_fails_the_load(pretended: Any, caplog: pytest.LogCaptureFixture) -> None:
    one = pretended(tiers=[MEMORY], **BY_LAYER)
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    one.layers = [0, 2]
    assert one.serve(FakeRequest("b", PROMPT[:]), range(8, 16)) == 0, "all is computed"
    assert "layer 1 was computed without a wait" in caplog.text


@pytest.mark.parametrize("lost", [0, 1])
def test_a_damaged_chunk_fails_the_load_after_the_step(pretended: Any, tmp_path: Path, lost: int) -> None:
    """And nothing of the step is saved."""
    pretended(tiers=[disk(tmp_path)]).serve(FakeRequest("a", PROMPT[:]), range(8))
    path = next((tmp_path / "kv").rglob(f"{lost}-*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    one = pretended(tiers=[disk(tmp_path)], **BY_LAYER)
    assert one.serve(FakeRequest("b", PROMPT[:]), range(8)) == lost * 2 * BLOCK
    assert one.serve(FakeRequest("c", PROMPT[:]), range(8, 16)) == 24


def test_a_load_that_cannot_begin_keeps_nobody_waiting(pretended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = pretended(tiers=[MEMORY], **BY_LAYER)
    one.serve(FakeRequest("a", PROMPT[:]), range(8))

    def refused(*given: Any, **more: Any) -> Any:
        raise ValueError("no")

    monkeypatch.setattr(one.engines[0], "load", refused)
    assert one.serve(FakeRequest("b", PROMPT[:]), range(8, 16)) == 0


def test_layers_before_one_that_fails_are_there_and_the_load_fails(
    pretended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pretended(tiers=[MEMORY], **BY_LAYER)
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    there = LayerEvents.there

    def fails(self: LayerEvents, *given: Any) -> None:
        if len(self._queued) == 1:
            raise RuntimeError("out of memory")
        there(self, *given)

    monkeypatch.setattr(LayerEvents, "there", fails)
    assert one.serve(FakeRequest("b", PROMPT[:]), range(8, 16)) == 0
