"""What a run's folder says, for a person: one page about a run, a table and picture of several."""
