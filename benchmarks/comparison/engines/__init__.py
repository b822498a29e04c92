"""Execute runs in local processes, on a Ray cluster or under torchrun, and store their records."""
