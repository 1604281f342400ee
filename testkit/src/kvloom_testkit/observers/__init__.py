"""Requirements of observers."""
