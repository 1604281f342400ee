"""Discovery of plugins, their hooks, and commands that install missing ones."""
