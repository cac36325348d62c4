"""Base models, and trained modules: how they are saved, loaded and published."""
