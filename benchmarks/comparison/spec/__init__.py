"""The specification of a comparison: command line, configuration, arms and runs."""
