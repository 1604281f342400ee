"""`kvloom check` and `kvloom new`."""
