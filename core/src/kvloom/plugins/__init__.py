"""Discovery of plugins, the hooks that they implement, and how to install what is missing."""
