"""Models of transformers, run with blended KV."""
