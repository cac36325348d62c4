"""Modules with parameters, how they are saved, loaded and pushed; loading of targets."""
