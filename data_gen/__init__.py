"""Prompts, the target's own answers to them, and the shards that hold both."""
