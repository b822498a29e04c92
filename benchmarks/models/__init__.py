"""Checks of every timm and torchvision model; the command is `zoo.py`."""
