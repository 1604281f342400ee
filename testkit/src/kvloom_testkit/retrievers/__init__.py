"""Requirements of blend retrievers."""
