"""`--worker-extension-cls kvloom_blend.vllm.RememberExtension`: passages are remembered by the engine that serves."""

from __future__ import annotations


class RememberExtension:
    """Methods of vLLM's worker, for `collective_rpc`."""

    def kvloom_remember(self, tokens: list[int], salt: str | None = None) -> int:
        """Compute a passage alone and keep its KV; how many tokens that are, 0 if it is kept already.

        TypeError unless the engine runs with KVLoomBlendConnector.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        from .connector import KVLoomBlendConnector

        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if not isinstance(connector, KVLoomBlendConnector):
            raise TypeError("kvloom_remember: this engine runs without KVLoomBlendConnector")
        return connector.remember(tokens, salt)
