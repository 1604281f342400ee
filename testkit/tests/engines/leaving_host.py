"""A host of the kit's own kind, whose engine leaves without a word: `python -m leaving_host SOCKET`."""

from __future__ import annotations

import os
import sys

from kvloom_testkit.engines import hosting


class Driver:
    def start(self) -> None:
        print("what it did before", flush=True)
        leaves()

    def fork_and_leave(self) -> None:
        child = os.fork()
        if not child:
            os._exit(4)
        assert os.waitpid(child, 0)[1] == 4 << 8

    def close(self) -> None:
        pass


def leaves() -> None:
    os._exit(3)


if __name__ == "__main__":
    hosting.run(sys.argv[1], lambda: {"version": "1"}, Driver)
