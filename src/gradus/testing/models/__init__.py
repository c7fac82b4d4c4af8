"""Models that tests build: small ones of many families."""
