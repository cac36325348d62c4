"""Sparse reading: methods that keep every KV entry and read a few of them per step."""
