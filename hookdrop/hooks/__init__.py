"""The hook of a layer, its state, and their integration with PyTorch (compiler, checkpoints, optimizers)."""
