"""Events for observers, and traces of single requests."""
