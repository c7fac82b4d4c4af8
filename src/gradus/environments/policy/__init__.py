"""How a worker asks the policy: its connections, and which replica gets a call."""
