"""A training run, from its spec to its record."""
