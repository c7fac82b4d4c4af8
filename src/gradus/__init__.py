"""gradus trains language-model agents with asynchronous reinforcement learning."""

__version__ = "0.1.0"
