"""SpeContext: reading what a retrieval head selects, with layers on the device or on the CPU."""
