"""Storage backends with a fault each, by topic as in `kvloom_testkit.backends`, and odd ones."""
