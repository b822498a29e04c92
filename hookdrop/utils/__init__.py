"""Small helpers that know nothing of hooks or regularizers."""
