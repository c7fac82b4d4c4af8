"""The folder of a run: its paths, its one writer, its checkpoints, and what makes it repeatable."""
