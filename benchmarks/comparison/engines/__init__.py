"""How runs are made and kept: in processes, on a Ray cluster or in torchrun's ranks; the store and the folder."""
