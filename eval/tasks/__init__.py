"""Tasks, their samples and their metrics."""
