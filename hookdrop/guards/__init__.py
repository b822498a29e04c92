"""Detect situations in which a regularizer does not do what was intended, and warn with the fix."""
