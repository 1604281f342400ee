"""A connector beside kvloom in vLLM's MultiConnector, whose first loads fail."""

from __future__ import annotations

from typing import Any

from kvloom_testkit.reference.vllm.connector import DirectoryConnector, Transfer


class Peer(DirectoryConnector):
    """`kv_connector_extra_config`, beside the reference's: `failing`, how many loads fail."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failing = int(self._kv_transfer_config.kv_connector_extra_config.get("failing", 0))

    def load(self, load: Transfer) -> None:
        if self.failing:
            self.failing -= 1
            for block in load.blocks:
                for cache in self.caches:
                    cache[block].fill_(7.0)
            self.bad.update(load.blocks)
        else:
            super().load(load)
