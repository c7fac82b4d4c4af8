"""What this machine has, and what starts on it for a config."""
