"""The side of `kvloom check engine vllm` that runs in vLLM's processes."""
