"""From records to findings: pairs, contrasts, intervals and tests, and the sentences that the results support."""
