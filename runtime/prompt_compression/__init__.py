"""Methods that shorten the prompt before the target reads it."""
