"""`make models`: the weights of the recipes whose packaged file comes in parts, downloaded and dequantised once."""

import shutil
import sys
from typing import Any

import torch

from keepsight.commands.cli import guarded
from keepsight.commands.recipe import recipes
from keepsight.errors import UserError
from keepsight.files import free_bytes, one_writer, size_text
from keepsight.models.model_files import cache_folder, dequantised, dequantised_folder
from keepsight.models.parts import joined_file
from keepsight.progress import progress_bar


def in_parts() -> dict[str, Any]:
    """The recipes whose packaged file comes in parts, by name."""
    recipes_in_parts = {}
    for name, recipe in recipes().items():
        if "model" in recipe and not isinstance(recipe.model.get("packaged", ""), str):
            recipes_in_parts[name] = recipe
    return recipes_in_parts


def run(names: list[str]) -> None:
    """Make the models of some recipes, of all by default, that are not in the cache; UserError as of `make`."""
    recipes_in_parts = in_parts()
    for name in names:
        if name not in recipes_in_parts:
            raise UserError(
                f"{name!r} is no recipe with weights to make; choose from {', '.join(recipes_in_parts)}",
                field="recipe",
                code="unknown",
            )
    missing = {}
    for name, recipe in recipes_in_parts.items():
        folder = dequantised_folder(recipe.model.packaged_digest)
        if names and name not in names:
            continue
        if (folder / "config.json").is_file():
            print(f"{name}: in {folder}")
        else:
            missing[name] = recipe
    if missing:
        size = sum(int(recipe.download) for recipe in missing.values())
        print(f"{', '.join(missing)}: {size_text(size)} to download, for {cache_folder()}", flush=True)
    for name, recipe in missing.items():
        make(name, recipe)


def make(name: str, recipe: Any) -> None:
    """Download the parts of a recipe's model, join and dequantise them, and delete what is no longer needed.

    UserError: there is no room for parts and joined file, one cannot be downloaded, or their digest is another one.
    """
    digest = recipe.model.packaged_digest
    final = dequantised_folder(digest)
    folder = cache_folder() / "parts" / final.name
    size = int(recipe.download)
    needed = 2 * size - sum(path.stat().st_size for path in folder.glob("*.part"))  # a stopped run's parts are there
    free = free_bytes(folder)
    if free < needed:
        raise UserError(
            f"{folder}: the parts and their file take {size_text(needed)} more, and {size_text(free)} are free; free "
            "some space, or name another folder by KEEPSIGHT_CACHE=",
            field="KEEPSIGHT_CACHE",
            code="memory",
        )
    folder.mkdir(parents=True, exist_ok=True)
    with one_writer(folder.parent):
        with progress_bar(total=size, name=name, unit="B") as progress:
            file = joined_file([*recipe.model.packaged], digest, folder, progress.update)
        dequantised(file, digest, torch.bfloat16, "make it again")
        shutil.rmtree(folder)
    print(f"{name}: in {final}", flush=True)


if __name__ == "__main__":
    sys.exit(guarded(lambda: run(sys.argv[1:])))
