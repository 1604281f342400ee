"""The index of a stored tier: which blobs it holds, their sizes, and the order in which they are evicted."""
