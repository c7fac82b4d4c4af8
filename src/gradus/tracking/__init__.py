"""What a run writes, given to trackers by a process of its own."""
