"""What a restart of the trainer needs: collected, split over ranks, written in the background."""
