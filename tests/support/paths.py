"""Where the tests find the rest of the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
