"""What a run writes, given to trackers by a separate process."""
