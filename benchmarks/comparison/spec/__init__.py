"""What is asked for: the configuration, the arms, and the runs that they come to."""
