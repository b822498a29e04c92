"""A study of regularizers on small language models: `python benchmarks/language_study.py`."""
