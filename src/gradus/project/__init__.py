"""What `gradus init` begins with: rows of yours, measured, and a folder that trains on them."""
