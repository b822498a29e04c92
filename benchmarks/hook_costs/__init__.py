"""What a hook costs while it drops nothing; `overhead.py` is the command."""
