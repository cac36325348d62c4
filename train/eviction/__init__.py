"""Training on what evicting costs the target's answers."""
