"""`kvloom demo`: prefill a document in one process, answer from its stored KV in another, check every claim."""
