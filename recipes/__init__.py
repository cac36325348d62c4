"""Recipes (one YAML file a model), mixtures of training prompts, and settings for accelerate and DeepSpeed."""
