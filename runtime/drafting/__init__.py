"""Drafts of the answer: as observers, and for speculative decoding."""
