"""What people bring to train on: rows in the forms that they have, and rewards, tried on them."""
