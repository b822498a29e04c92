"""What a comparison shows: the HTML page, the table in the terminal, and progress while it runs."""
