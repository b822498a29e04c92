"""How runs get done: in processes, on a cluster, or in the ranks that torchrun started."""
