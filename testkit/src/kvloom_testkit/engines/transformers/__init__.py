"""`kvloom check engine transformers`: caches of `model.generate`."""
