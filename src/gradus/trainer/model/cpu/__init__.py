"""Forms of a model in plain torch: for CPUs, and for what a GPU has no kernel for."""
