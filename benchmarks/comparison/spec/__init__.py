"""What is asked for: the command line, the configuration, the arms, and the runs that follow from them."""
