"""The method that `keepsight serve` and `keepsight prefix` evict with."""

from keepsight.commands.config_serving import Evicting, Paged
from keepsight.commands.variants import require_evict
from keepsight.errors import UserError
from keepsight.runtime.allocate import Global, Uniform
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import Method
from keepsight.runtime.methods import Resources, make_method
from keepsight.runtime.methods.make import takes


def method_of(config: Evicting, resources: Resources, **options: object) -> Method:
    """The method; `options` take precedence over the configuration's."""
    budget = config.budget if takes(config.method, "budget") else None
    return make_method(config.method, budget, resources, **{**config.options, **options})


def prefix_method(config: Paged, resources: Resources) -> Evict:
    """A method whose heads keep the same numbers of entries, or whole pages.

    Raises:
        UserError: they keep other numbers, or it evicts nothing.
    """
    refusal = f"method={config.method} evicts nothing from the cache, so there is no prefix to write"
    method = require_evict(method_of(config, resources), refusal)
    if config.page:
        shared = isinstance(method.allocate, Global)  # keeps what is trained of it, such as weights of heads
        allocate = {"page": config.page} if shared else {"name": "global", "page": config.page}
        given = config.options.get("allocate")
        given = {"name": given} if isinstance(given, str) else given or {}
        method = require_evict(method_of(config, resources, allocate={**given, **allocate}), refusal)
    elif not isinstance(method.allocate, Uniform):
        raise UserError(
            f"method={config.method} lets heads keep different numbers of entries ({type(method.allocate).__name__}); "
            "give page=32 for vLLM with KEEPSIGHT_RAGGED=1, or options={allocate: uniform}"
        )
    if method.every:
        raise UserError("a prefix is evicted from once: leave out the option every")
    return method
