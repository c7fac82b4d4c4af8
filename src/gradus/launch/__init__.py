"""From configs to processes."""
