"""`kvloom check engine sglang`: storages of HiCache, without the engine in front of them."""
