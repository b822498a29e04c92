"""What the records of a comparison allow to say: pairs, contrasts, intervals, and the sentences about them."""
