"""Devices that are not there, for connectors that queue work."""
