"""The shared runtime: importance, attention, cache, prefill, selection, decoding."""
