"""Datasets, their splits and batches."""
