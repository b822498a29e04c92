"""Checks of a recipe in every family of transformers; the command is `transformers_zoo.py`."""
