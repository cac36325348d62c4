"""Methods that keep every KV entry and read a few of them at each step."""
