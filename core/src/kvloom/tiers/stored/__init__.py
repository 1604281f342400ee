"""A stored tier: any backend behind a serializer, the envelope, deadlines and a breaker."""
