"""Playing: which task comes next, how its episode runs, and whether its result can be trusted."""
