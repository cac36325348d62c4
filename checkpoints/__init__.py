"""Trained artifacts small enough to ship, one folder each."""
