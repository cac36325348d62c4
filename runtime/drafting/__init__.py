"""Drafts of the answer: as observers (SpecKV), and for speculative decoding."""
