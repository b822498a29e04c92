"""Guards warn about what is probably not intended. They listen to what the core announces, from this import on."""

from hookdrop.guards import plan as plan
from hookdrop.guards import progress as progress
