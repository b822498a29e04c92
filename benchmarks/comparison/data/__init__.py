"""The data sets of a comparison, how they are split, and their batches."""
