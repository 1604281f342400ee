"""The requirements of storage backends, by topic; `kvloom_testkit.backend` puts them together."""
