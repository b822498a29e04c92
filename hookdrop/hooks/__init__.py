"""One hooked layer: its hook, its state, and where PyTorch meets them (compiler, checkpoints, optimizers)."""
