"""What the user writes, as one strict tree, and how it becomes one config per process."""
