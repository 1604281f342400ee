"""`kvloom calibrate`: what a model's own text says about its KV."""
