"""The policy, served."""
