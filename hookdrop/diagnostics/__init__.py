"""Checks, measurements, recordings and dry runs. They observe the hooks, which never import them."""
