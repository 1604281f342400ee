"""`kvloom blend demo`: questions over real texts, in orders that were not seen before, by every executor."""
