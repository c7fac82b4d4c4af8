"""Other nodes of a run: the connection to each, and the process that owns what runs there."""
