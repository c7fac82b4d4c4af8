"""What every environment process needs and verifiers lacks."""
