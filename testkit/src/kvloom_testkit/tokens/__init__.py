"""Requirements of token databases."""
