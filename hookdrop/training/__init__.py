"""Helpers for trainings with injections: seeds of ranks, statistics of averages."""
