"""Requirements for whole connectors of a serving engine: `kvloom check engine`. Nothing here imports the engine."""
