"""keepsight bench: measure speed and memory on this machine. Prints medians of repeated timings, and writes nothing."""

COMMANDS = {
    "train": "a training step of a lookahead module against a prefill",
    "eval": "the sweep of an evaluation against one run per method and budget",
    "evict": "observing and selecting of each method against the prefill",
    "specache": "a decoding step with packed KV entries, by part",
    "speculate": "speculative decoding with a draft head against plain decoding",
    "retrieve": "a retrieval head: its size, its decoding steps, what it loads",
}
