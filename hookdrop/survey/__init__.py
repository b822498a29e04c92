"""Ask a model what it computes, by running it on an example: calls, shapes, residual branches.

This package is the only place that runs the user's model besides `probe` and `predict`.
"""
