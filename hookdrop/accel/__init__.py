"""Compiled loops and GPU kernels. They only affect speed, and nothing imports them: see `kernels/accelerators.py`."""
