"""The requirements of storage backends, by topic; `kvloom_testkit.backends.conformance` puts them together."""
