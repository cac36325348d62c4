"""Training of the weights by which heads share one budget."""
