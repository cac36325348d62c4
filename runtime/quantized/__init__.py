"""Low-bit KV caches: KIVI and SpeCache."""
