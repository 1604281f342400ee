"""Requirements of serializers."""
