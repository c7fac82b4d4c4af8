"""Numbers and traces out of a run."""
