"""Forms of a model that serve CPUs only."""
