"""Immutable values: configuration, batches, caches behind persistent handles, allocation, sampling, errors."""
