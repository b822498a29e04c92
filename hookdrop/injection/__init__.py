"""Resolve patterns to layers, place hooks on them, and control the hooks through a handle."""
