"""Execute runs in local processes, and store their records."""
