"""What the orchestrator writes down: journal, episodes, metrics; and the watch over its waits."""
