"""SpeContext: a retrieval head selects what is read, from layers on the device or on the CPU."""
