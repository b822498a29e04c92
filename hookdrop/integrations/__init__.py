"""Callbacks for trainers, which import the trainer: `hookdrop.integrations.lightning`, `.transformers`, `.fastai`."""
