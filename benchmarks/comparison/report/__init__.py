"""The output of a comparison: the HTML report, the terminal table, and the progress display."""
