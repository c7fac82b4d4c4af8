"""gradus trains language-model agents with asynchronous reinforcement learning."""

from gradus.companions import hide_misfits

__version__ = "0.1.0"

hide_misfits()
