"""Execute runs in local processes or on a Ray cluster, and store their records."""
