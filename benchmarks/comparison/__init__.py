"""What `compare.py` is made of: regularizers compared in paired training runs."""
