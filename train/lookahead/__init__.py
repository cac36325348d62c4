"""Training of lookahead modules."""
