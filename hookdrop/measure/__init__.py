"""What hooks do, measured and sampled."""
