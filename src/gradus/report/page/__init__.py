"""The page about one run, which shows everything that a person asks and loads nothing."""
