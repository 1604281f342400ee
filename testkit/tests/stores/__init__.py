"""Other people's key-value stores behind the thinnest adapters that could be written: what the kit finds in them.

None of them is a backend to use. What an adapter claims is what its store's documentation says.
"""
