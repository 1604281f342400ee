"""Requirements of GPU connectors, and memory for them to work on."""
