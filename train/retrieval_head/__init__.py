"""Distillation of retrieval heads."""
