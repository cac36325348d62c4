"""What is evaluated: tasks, their samples and their metrics."""
