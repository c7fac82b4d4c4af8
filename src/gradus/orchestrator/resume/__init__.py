"""What a restart of the orchestrator needs: taken at one moment, stored, restored."""
