"""The overhead of idle hooks; the command is `overhead.py`."""
