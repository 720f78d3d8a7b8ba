"""Scheduling policies: each file has `key(sequence, cached, **options)`, and the sequence with the smallest key goes
first. ``cached()`` looks up how many tokens of its prompt are in the cache. Ties go by arrival."""
