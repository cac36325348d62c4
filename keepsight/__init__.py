"""KV-cache eviction for transformers models, by trained lookahead modules and by other methods.

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
    from keepsight.commands.functions import evaluate as evaluate
    from keepsight.commands.functions import fit as fit
    from keepsight.models.targets import load_target as load_target
    from keepsight.runtime.conversation import Conversation as Conversation
    from keepsight.runtime.drafting.speculative import Speculative as Speculative
    from keepsight.runtime.generate import generate as generate
    from keepsight.runtime.generate import make_method as make_method
    from keepsight.runtime.methods import *  # noqa: F403
    from keepsight.runtime.methods.reconstruction import Reconstruction as Reconstruction
    from keepsight.runtime.pipeline import pipeline as pipeline
    from keepsight.runtime.saved import load_state as load_state
    from keepsight.runtime.saved import save_state as save_state

__version__ = "0.1.0"

_MODULES = {
    "Conversation": "keepsight.runtime.conversation",
    "Reconstruction": "keepsight.runtime.methods.reconstruction",
    "Speculative": "keepsight.runtime.drafting.speculative",
    "evaluate": "keepsight.commands.functions",
    "fit": "keepsight.commands.functions",
    "generate": "keepsight.runtime.generate",
    "load_state": "keepsight.runtime.saved",
    "load_target": "keepsight.models.targets",
    "make_method": "keepsight.runtime.methods",
    "pipeline": "keepsight.runtime.pipeline",
    "save_state": "keepsight.runtime.saved",
}
"""Where the names come from that are no methods; those of methods are the classes that the registry holds."""

_here = Path(__file__).resolve().parent
if not (_here / "runtime").is_dir():  # a checkout: runtime/, models/, ... lie beside this folder, not in it
    __path__.append(str(_here.parent))  # noqa: F405


def __getattr__(name: str) -> object:
    if name == "__all__":
        return _exports()
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name[:1].isupper():  # a class; `from keepsight import recipes` imports no method
        for kind in import_module("keepsight.runtime.methods").METHODS.values():
            if kind.__name__ == name:
                return kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_exports()})


def _exports() -> list[str]:
    """The names that `from keepsight import *` imports."""
    methods = import_module("keepsight.runtime.methods").METHODS.values()
    return sorted({*_MODULES, *(kind.__name__ for kind in methods)})
