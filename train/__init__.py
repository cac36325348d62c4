"""Training of lookahead modules, draft heads and retrieval heads."""
