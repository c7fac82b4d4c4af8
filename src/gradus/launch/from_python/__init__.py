"""What a script or a notebook does with runs: start one and read what it wrote."""
