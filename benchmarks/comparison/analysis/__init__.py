"""Compute results from records: pairs, contrasts, intervals, tests, and the statements that they support."""
