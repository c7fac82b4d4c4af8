"""`gradus agent`: an agent that exists already, tried against a model."""
