"""Reads rows in the forms that people have, and tries rewards on them."""
