"""Drawing and applying masks: seed rates, block geometry, native loops and custom operators."""
