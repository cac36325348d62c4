"""KV-cache eviction for transformers models, by trained lookahead modules and by 46 other methods.

```python
from keepsight import LookaheadKV, SnapKV, generate

ids = generate(model, input_ids, LookaheadKV.from_pretrained("user/adapter", budget=128), max_new_tokens=64)
model.generate(**inputs, custom_generate=SnapKV(budget=128))
```

The names below are imported when they are first used, so that `import keepsight` takes no time.
"""

# ruff: noqa: F403, F405

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keepsight.commands.functions import evaluate, fit
    from keepsight.models.targets import load_target
    from keepsight.runtime.conversation import Conversation
    from keepsight.runtime.drafting.speculative import Speculative
    from keepsight.runtime.generate import generate
    from keepsight.runtime.methods import *
    from keepsight.runtime.methods.kvpress import from_kvpress, to_kvpress
    from keepsight.runtime.pipeline import pipeline
    from keepsight.runtime.saved import load_state, save_state

__version__ = "0.1.0"
__all__ = [
    "H2O",
    "LAQ",
    "R2C",
    "RKV",
    "TOVA",
    "AdaKV",
    "ClusterKV",
    "Conversation",
    "CriticalAdaKV",
    "CriticalKV",
    "CurDKV",
    "DBTrimKV",
    "DapQ",
    "Evict",
    "ExactTopK",
    "ExpectedAdaKV",
    "ExpectedAttention",
    "FastKVzip",
    "FastV",
    "FullCache",
    "InfLLM",
    "KVgrad",
    "KVzap",
    "KVzip",
    "KVzipPlus",
    "KeyDiff",
    "KeyNorm",
    "Kivi",
    "LAQPlus",
    "LLMLingua2",
    "LaCache",
    "Locret",
    "LookaheadKV",
    "Oracle",
    "PyramidKV",
    "Quest",
    "RandomEntries",
    "Reconstruction",
    "RestoreKV",
    "SentenceSimilarity",
    "ShadowKV",
    "SnapKV",
    "SpeCache",
    "SpeContext",
    "SpecKV",
    "SpecKVPC",
    "SpecPC",
    "Speculative",
    "StreamingLLM",
    "TriAttention",
    "TrimKV",
    "Truncation",
    "evaluate",
    "fit",
    "from_kvpress",
    "generate",
    "load_state",
    "load_target",
    "pipeline",
    "save_state",
    "to_kvpress",
]

_ELSEWHERE = {
    "Speculative": "keepsight.runtime.drafting.speculative",
    "Conversation": "keepsight.runtime.conversation",
    "evaluate": "keepsight.commands.functions",
    "fit": "keepsight.commands.functions",
    "from_kvpress": "keepsight.runtime.methods.kvpress",
    "generate": "keepsight.runtime.generate",
    "load_state": "keepsight.runtime.saved",
    "load_target": "keepsight.models.targets",
    "pipeline": "keepsight.runtime.pipeline",
    "save_state": "keepsight.runtime.saved",
    "to_kvpress": "keepsight.runtime.methods.kvpress",
}

_here = Path(__file__).resolve().parent
if not (_here / "runtime").is_dir():  # a checkout: runtime/, models/, ... lie beside this folder, not in it
    __path__.append(str(_here.parent))


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE.get(name, "keepsight.runtime.methods")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
