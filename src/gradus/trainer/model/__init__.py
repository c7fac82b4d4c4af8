"""Loading, sharding and naming of models."""
