"""Several agents in one episode: the parts that know nothing of models and environments."""
