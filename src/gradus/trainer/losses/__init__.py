"""Per-token losses; they never normalise."""
