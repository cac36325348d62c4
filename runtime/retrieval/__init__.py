"""Reading what a retrieval head chooses, with layers on the device or on the CPU."""
