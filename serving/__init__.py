"""Evicted caches in serving engines: prefixes that an engine loads as the KV entries of an ordinary prompt."""
