"""Drawing and applying masks: seed rates, block geometry and custom operators."""
