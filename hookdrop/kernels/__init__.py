"""Drawing masks and applying them: seed rates, block geometry, native loops and custom operators."""
