"""Methods that need more than a regularizer: hooks at other places, and recipes."""
