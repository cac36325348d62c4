"""The runtime of all methods: cache layers, prefill, observers, allocation, eviction, decoding."""
