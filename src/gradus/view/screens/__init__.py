"""What each view of the page shows, read from the folder of a run."""
