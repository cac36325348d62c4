"""What things cost: time and memory."""
