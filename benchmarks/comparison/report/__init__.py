"""What a person sees of a comparison: the HTML page, the table in the terminal, and the progress."""
