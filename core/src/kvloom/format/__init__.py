"""The form of stored blobs: the envelope with its checksums, and encryption."""
