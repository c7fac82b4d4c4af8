"""Parameters, trainer to inference."""
