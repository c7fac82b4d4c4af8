"""How files and flags become values: the command line, layers, TOML, renamed keys, prime-rl."""
