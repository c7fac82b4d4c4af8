"""What task sets share: rows of a data set, a hold-out by hash, reward functions by name."""
