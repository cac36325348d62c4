"""keepsight in stock vLLM: a KV connector, an ASGI middleware and an attention backend."""
