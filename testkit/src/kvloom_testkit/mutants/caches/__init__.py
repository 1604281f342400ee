"""The reference cache of transformers with one fault each. Importing the modules needs transformers."""
