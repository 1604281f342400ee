"""The verbs of `kvloom`, one module for each; `add` registers it."""
