"""What `gradus env check` asks of an environment, and how it finds out."""
