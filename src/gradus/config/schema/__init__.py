"""What a user writes: one strict model for each section of a config file."""
