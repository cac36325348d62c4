"""keepsight bench: measure speed and memory on this machine. Prints medians of repeated timings, writes nothing."""

COMMANDS = {
    "train": "a training step of a lookahead module against a prefill",
    "eval": "the sweep of an evaluation against one run per method and budget",
    "evict": "observing and selecting of each method against the prefill",
    "decode": "a decoding step from what each method keeps against the full cache",
    "ops": "operators and device syncs of each method, counted as a GPU would feel them",
    "specache": "a decoding step with packed KV entries, by part",
    "speculate": "speculative decoding with a draft head against plain decoding",
    "retrieve": "a retrieval head: its size, its decoding steps, what it loads",
}
