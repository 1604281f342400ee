"""Requirements of blend executors."""
