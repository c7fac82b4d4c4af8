"""The memory that a trainer will need, before it loads anything; no torch."""
