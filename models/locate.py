"""Where a model is read from: a local folder, the Hugging Face Hub or its cache, or an installed Python package."""

import logging
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from keepsight.errors import UserError
from keepsight.models.packaged import dequantised, packaged_file
from keepsight.models.versions import folder_version

logger = logging.getLogger("keepsight")


def located(
    model_id: str, revision: str | None, packaged: str | None, packaged_digest: str | None
) -> tuple[str | Path, str | None, dict[str, Any]]:
    """Where a model is read from, its version where that is known beforehand, and how the Hub's client is asked.

    Raises:
        UserError: it is neither a folder, nor on the Hub, nor in an installed package.
    """
    if Path(model_id).is_dir():
        if other := [path for path in Path(model_id).glob("*.json") if not path.is_file()]:  # transformers goes on
            raise UserError(f"{other[0]}: expected a file; remove it, or copy the model again")
        return Path(model_id), folder_version(Path(model_id)), {}
    _check_hub_id(model_id)
    offline = not hub_answers()
    if not offline or try_to_load_from_cache(model_id, "config.json", revision=revision):
        return model_id, None, {"revision": revision, "local_files_only": offline}
    if packaged is None:
        raise UserError(
            f"model {model_id!r} is no folder, is not in the Hub's cache, and the Hub does not answer; give a folder "
            "with its config.json as model.id="
        )
    path = packaged_file(packaged)
    logger.warning("%s cannot be fetched from the Hub; using the packaged file %s instead", model_id, path.name)
    return *dequantised(path, packaged_digest), {}


def hub_answers() -> bool:
    """Whether the Hugging Face Hub can be reached: one short request; the Hub's client would retry for a minute."""
    if constants.is_offline_mode():
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _check_hub_id(model_id: str) -> None:
    try:
        validate_repo_id(model_id)
    except HFValidationError:
        raise UserError(f"model {model_id!r} is neither a folder nor a Hub id; a Hub id looks like user/name") from None
