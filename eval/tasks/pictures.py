"""Prompts with images: how they are rendered, and read again when they are answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepsight.errors import UserError, one_line
from keepsight.eval.tasks.samples import RenderedSample, Sample, bucket
from keepsight.files import file_digest, json_digest
from keepsight.models.chat import chat_text

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Pictures:
    """The images of a prompt, read anew each time: the pixels of all samples would not fit into memory.

    `text` is the prompt as the chat template made it, with a place for each of the image files in `paths`.
    """

    text: str
    paths: tuple[Path, ...]
    processor: Any = field(compare=False, repr=False)

    def inputs(self) -> "Mapping[str, Tensor]":
        """The model's inputs, as its processor names them: `input_ids` [1, N] int64, pixels, token types.

        UserError: a file is no image, or the text has not one place for each image.
        """
        from torch import Tensor

        images = list(map(_load_image, self.paths))
        try:
            inputs = self.processor(text=[self.text], images=images, add_special_tokens=False, return_tensors="pt")
        except ValueError as error:
            raise UserError(
                f"{self.paths[0]}: the processor refuses the images of this prompt: {error}",
                field="images",
                code="data",
            ) from None
        return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}

    @property
    def digest(self) -> str:
        """Digest of the files' bytes and of the processor's settings; see `keepsight.eval.inputs`."""
        settings = self.processor.image_processor.to_json_string()
        return json_digest([self.text, *map(file_digest, self.paths), settings])


def render_pictured(sample: Sample, parts: Sequence[str | Path], tokenizer: Any, processor: Any) -> RenderedSample:
    """A sample whose user's turn has texts and image files, rendered; UserError without chat template or image."""
    content = []
    paths = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            content.append({"type": "image"})
            paths.append(part)
    text = chat_text(tokenizer, [{"role": "user", "content": content}])
    pictures = Pictures(text, tuple(paths), processor)
    ids = pictures.inputs()["input_ids"][0]
    fields: dict[str, Any] = {**vars(sample), "length": bucket(len(ids))}
    return RenderedSample(**fields, prompt_ids=ids, question_ids=ids[:0], pictures=pictures)


def _load_image(path: Path) -> Any:
    from transformers.image_utils import load_image

    try:
        return load_image(str(path))
    except (OSError, ValueError) as error:
        reason = "no such file" if not path.is_file() else one_line(error, 100)
        raise UserError(
            f"{path}: the image cannot be read ({reason}); download the images again", field=path.name, code="file"
        ) from None
