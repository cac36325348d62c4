"""One file a command: a `Config` with its keys, and `run(config)`."""
