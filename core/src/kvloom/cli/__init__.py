"""The `kvloom` command: one module per verb. What a verb needs is imported inside it, so that `--help` is instant."""
