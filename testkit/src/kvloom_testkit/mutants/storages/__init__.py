"""The reference storage of SGLang with one fault each. Importing the modules needs SGLang."""
