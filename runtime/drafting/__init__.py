"""Drafts: who guesses the coming tokens, as an observer and for speculative decoding."""
