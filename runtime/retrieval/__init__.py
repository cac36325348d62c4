"""SpeContext: a retrieval head selects the entries to read; layers may be on the device or on the CPU."""
