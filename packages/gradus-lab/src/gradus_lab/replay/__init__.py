"""Replay: the batches of a recorded run made again and compared."""
