"""From a recipe to a loaded target, the adapter and the draft it names."""

from pathlib import Path

from keepsight.config import Recipe
from keepsight.errors import UserError
from keepsight.models.drafts import Draft, LayerSubset, load_draft
from keepsight.models.targets import Target, load_target
from keepsight.runtime.methods import Resources

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


def draft_of(recipe: Recipe, target: Target) -> Draft | None:
    """The recipe's draft, found to fit the target; None when the recipe names none.

    Raises:
        UserError: both kinds of draft are named, or the one that is named does not fit the target.
    """
    named, model = recipe.draft, recipe.model
    if named.layers is not None and named.id is not None:
        raise UserError(f"draft.layers and draft.id={named.id} name two drafts; add draft.layers=null or draft.id=null")
    if named.id is not None:
        options = {"dtype": model.dtype, "device": model.device, "attention": model.attention}
        return load_draft(named.id, target, revision=named.revision, **options)
    if named.layers is None:
        return None
    draft = LayerSubset(tuple(named.layers))
    draft.of(target.model)
    return draft


def has_draft(recipe: Recipe) -> bool:
    """Whether the recipe names a draft."""
    return recipe.draft.layers is not None or recipe.draft.id is not None


def resources_of(recipe: Recipe, target: Target) -> Resources:
    """What methods may need: the recipe's adapter and draft, and the target's tokenizer."""
    return Resources(adapter_of(recipe), lambda: draft_of(recipe, target), target.tokenizer)
