"""The processor of a target that reads images: it makes token ids and pixels from text and images."""

import inspect
from pathlib import Path
from typing import Any

from transformers import AutoProcessor
from transformers.utils import is_torchvision_available

from keepsight.errors import UserError
from keepsight.models.locate import hub_answers
from keepsight.models.targets import Target


def processor_of(target: Target) -> Any:
    """The processor that comes with a target.

    Raises:
        UserError: the target reads no images, or its processor cannot be loaded.
    """
    config = target.model.config
    if "pixel_values" not in inspect.signature(target.model.forward).parameters:
        raise UserError(
            f"model {target.name!r} ({config.model_type}) reads no images; choose one that does, such as Qwen2.5-VL"
        )
    where: dict[str, Any] = {}
    if not Path(target.name).is_dir():
        where = {"revision": getattr(config, "_commit_hash", None), "local_files_only": not hub_answers()}
    try:
        processor = AutoProcessor.from_pretrained(target.name, trust_remote_code=False, **where)
    except Exception as error:  # of damaged files any is raised
        remedy = "fetch the model again" if is_torchvision_available() else "install torchvision, which Qwen's needs"
        reason = " ".join(str(error).split())[:150]
        raise UserError(f"{target.name!r}: its processor of images cannot be loaded; {remedy} ({reason})") from error
    if not hasattr(processor, "image_processor"):
        raise UserError(f"model {target.name!r} comes without a preprocessor_config.json; fetch it again, whole")
    return processor
