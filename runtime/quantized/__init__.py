"""Packed entries in few bits: KIVI, and SpeCache, which fetches some in full precision."""
