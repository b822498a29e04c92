"""Checks of the recipes on every family of transformers; the command is `families.py`... """
