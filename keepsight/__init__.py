"""keepsight trains small modules that look ahead, and keeps the KV-cache entries that the coming answer will read.

```python
from keepsight import LookaheadKV, SnapKV, generate

ids = generate(model, input_ids, LookaheadKV.from_pretrained("user/adapter", budget=128), max_new_tokens=64)
model.generate(**inputs, custom_generate=SnapKV(budget=128))
```

The names below are imported when they are first used, so that `import keepsight` takes no time.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keepsight.models.targets import load_target
    from keepsight.runtime.generate import generate
    from keepsight.runtime.methods import FullCache, LookaheadKV, Oracle, SnapKV, StreamingLLM

__version__ = "0.1.0"
__all__ = ["FullCache", "LookaheadKV", "Oracle", "SnapKV", "StreamingLLM", "generate", "load_target"]

_here = Path(__file__).resolve().parent
if not (_here / "runtime").is_dir():  # a checkout: runtime/, models/, ... lie beside this folder, not in it
    __path__.append(str(_here.parent))

_MODULES = {
    "FullCache": "keepsight.runtime.methods",
    "LookaheadKV": "keepsight.runtime.methods",
    "Oracle": "keepsight.runtime.methods",
    "SnapKV": "keepsight.runtime.methods",
    "StreamingLLM": "keepsight.runtime.methods",
    "generate": "keepsight.runtime.generate",
    "load_target": "keepsight.models.targets",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
