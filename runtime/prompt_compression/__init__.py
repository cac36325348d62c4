"""Methods that shorten the prompt before the base model reads it."""
