"""What the inference server does only where it has a GPU."""
