"""Reference connectors of vLLM. Importing the modules needs vLLM."""
