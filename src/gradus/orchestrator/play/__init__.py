"""Playing: which task comes next, how its episode runs, and what of it is believed."""
