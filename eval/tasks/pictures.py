"""Prompts with images: the user's turn with its image files, as the target's processor makes it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.image_utils import load_image

from keepsight.errors import UserError
from keepsight.eval.tasks.samples import RenderedSample, Sample
from keepsight.files import file_digest, text_digest
from keepsight.models.chat import chat_text


@dataclass(frozen=True)
class Pictures:
    """The images of a prompt, read anew each time: the pixels of all samples would not fit into memory.

    Attributes:
        text: The prompt as the chat template made it, with a place for each image.
        paths: The image files, in the order of their places.
        processor: The target's.
    """

    text: str
    paths: tuple[Path, ...]
    processor: Any = field(compare=False, repr=False)

    def inputs(self) -> Mapping[str, Tensor]:
        """What the target reads, as its processor names it: `input_ids` [1, N] int64, pixels, kinds of tokens.

        Raises:
            UserError: a file is no image, or the text has not one place for each image.
        """
        images = [_read(path) for path in self.paths]
        try:
            made = self.processor(text=[self.text], images=images, add_special_tokens=False, return_tensors="pt")
        except ValueError as error:
            raise UserError(f"{self.paths[0]}: the processor refuses the images of this prompt: {error}") from None
        return {name: value for name, value in made.items() if isinstance(value, Tensor)}

    @property
    def digest(self) -> str:
        """Of the files' bytes and of what is done to them; see `keepsight.eval.reuse`."""
        settings = self.processor.image_processor.to_json_string()
        return text_digest(json.dumps([self.text, *map(file_digest, self.paths), settings]))


def render_pictured(sample: Sample, parts: list[str | Path], tokenizer: Any, processor: Any) -> RenderedSample:
    """A sample whose user's turn is made of texts and image files, with its prompt as token ids.

    Raises:
        UserError: the tokenizer has no chat template, or an image cannot be read.
    """
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    text = chat_text(tokenizer, [{"role": "user", "content": content}])
    pictures = Pictures(text, tuple(part for part in parts if isinstance(part, Path)), processor)
    ids = pictures.inputs()["input_ids"][0]
    return RenderedSample(**vars(sample), prompt_ids=ids, question_ids=ids[:0], pictures=pictures)


def _read(path: Path) -> Any:
    try:
        return load_image(str(path))
    except (OSError, ValueError) as error:
        reason = "no such file" if not path.is_file() else " ".join(str(error).split())[:100]
        raise UserError(f"{path}: the image cannot be read ({reason}); fetch the images again") from None
