"""Forms of a model that serve GPUs only."""
