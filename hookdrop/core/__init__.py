"""Selection, regularizers, schedules, hooks, plans and handles: what every injection uses."""
