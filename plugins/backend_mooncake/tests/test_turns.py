"""One call of a client at a time changes a key; calls for other keys do not wait."""

from __future__ import annotations

import threading
import time

import pytest

from kvloom import BackendError
from kvloom_backend_mooncake.turns import Turns


def test_a_key_that_is_being_changed_is_waited_for_and_others_are_not() -> None:
    turns, order, begun = Turns(10), [], threading.Event()

    def change() -> None:
        begun.set()
        with turns.of(["b", "c"]):
            order.append("second")

    with turns.of(["a", "b"]):
        waiting = threading.Thread(target=change)
        waiting.start()
        assert begun.wait(10)
        with turns.of(["c", "d"]):  # whoever waits holds nothing meanwhile
            time.sleep(0.05)
        order.append("first")
    waiting.join(10)
    assert order == ["first", "second"]


def test_waiting_ends_and_a_call_that_failed_gives_its_turn_up() -> None:
    turns = Turns(0.01)
    with turns.of(["a"]), pytest.raises(BackendError, match="changing the same keys"), turns.of(["b", "a"]):
        pass
    with pytest.raises(KeyError), turns.of(["a"]):
        raise KeyError
    with turns.of(["a", "b"]):
        pass
