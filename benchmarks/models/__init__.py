"""Every timm and torchvision model with hooks and without; `zoo.py` is the command."""
