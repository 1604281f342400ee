"""Stores behind the backend: obstore, fsspec, SFTP and local files."""
