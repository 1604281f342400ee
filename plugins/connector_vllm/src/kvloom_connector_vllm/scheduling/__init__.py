"""The scheduler's half of the connector: what is loaded and saved in each step. Knows no vLLM."""
