"""The chat harness under a name that verifiers can import."""
