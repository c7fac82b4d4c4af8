"""Task sets share these: rows of a data set, a hold-out by hash, reward functions by name."""
