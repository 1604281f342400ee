"""The reference connector of vLLM with one fault each, and legal oddities. Importing the modules needs vLLM."""
