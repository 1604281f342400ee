"""The contracts of plugins, one module for each kind of component. Imports only errors and types."""
