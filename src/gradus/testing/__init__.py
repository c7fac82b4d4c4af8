"""The scripted engine, the tiny model and made-up episodes, for commands, examples and tests."""
