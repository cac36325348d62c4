"""Training data: prompts of a mixture, the base model's answers to them, and the shards that store both."""
