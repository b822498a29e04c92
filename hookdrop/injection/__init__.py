"""From a model and patterns to placed hooks, and the handle that controls them."""
