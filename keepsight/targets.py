"""From a recipe to a loaded target and the adapter it names."""

from pathlib import Path

from keepsight.config import Recipe
from keepsight.errors import UserError
from keepsight.models.targets import Target, load_target

_SHIPPED = "shipped:"


def target_of(recipe: Recipe) -> Target:
    """Load the recipe's target."""
    model = recipe.model
    return load_target(
        model.id,
        revision=model.revision,
        packaged=model.packaged,
        packaged_digest=model.packaged_digest,
        dtype=model.dtype,
        device=model.device,
        attention=model.attention,
        trust_remote_code=model.trust_remote_code,
    )


def adapter_of(recipe: Recipe) -> str | None:
    """The recipe's adapter as a folder or a Hub id; `shipped:NAME` is a folder that comes with keepsight.

    Raises:
        UserError: keepsight ships no adapter of that name.
    """
    if recipe.adapter is None or not recipe.adapter.startswith(_SHIPPED):
        return recipe.adapter
    from keepsight import checkpoints

    name = recipe.adapter.removeprefix(_SHIPPED)
    for base in checkpoints.__path__:
        if (folder := Path(base) / name).is_dir():
            return str(folder)
    raise UserError(f"adapter={recipe.adapter}: keepsight ships no adapter {name!r}; name a folder or a Hub id")
