"""What plugins implement: one module per kind of component. Imports only errors and types."""
