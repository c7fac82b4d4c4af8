"""Entry points: one module for each way to train, with the source of its batches."""
