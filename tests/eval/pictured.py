"""A tiny target that reads images, and a small folder in MileBench's layout."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import is_torchvision_available

from keepsight.files import write_json
from tests.families import fresh_model
from tests.tiny import tiny_tokenizer

_IMAGE_TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
_TEMPLATE = """
{%- for message in messages %}<|{{ message['role'] }}|>
    {%- if message['content'] is string %}{{ message['content'] }}{% else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def save_pictured_target(folder: Path, seed: int = 0) -> Path:
    """A tiny Qwen2.5-VL with tokenizer and image processor; an image of 16 x 16 pixels has 4 tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": _IMAGE_TOKENS})
    tokenizer.chat_template = _TEMPLATE
    image, video, start, end = (tokenizer.convert_tokens_to_ids(token) for token in _IMAGE_TOKENS)
    model = fresh_model(
        "Qwen2.5-VL (text)",
        seed,
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        pad_token_id=0,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    pixels: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    Qwen2VLImageProcessorPil(**pixels, min_pixels=64, max_pixels=4096).save_pretrained(folder)
    return folder


def without_videos(patch: pytest.MonkeyPatch) -> None:
    """Qwen's processor reads videos as well, for which alone it needs torchvision."""
    if not is_torchvision_available():
        patch.setattr(Qwen2_5_VLProcessor, "get_attributes", classmethod(lambda _: ["image_processor", "tokenizer"]))
        patch.setattr(Qwen2_5_VLProcessor, "check_argument_for_proper_class", lambda *_: None)


def row(number: int, context: str, images: list[str], response: str, choices: list[str] | None = None) -> Any:
    """A row of a data set."""
    instance: dict[str, Any] = {"context": context, "images_path": images}
    if choices:
        instance["choice_list"] = choices
    return {
        "sample_id": number,
        "task_instruction_id": 0,
        "task_instance": instance,
        "response": response,
        "image_quantity_level": "Few",
    }


def write_data_set(folder: Path, name: str, kind: str, rows: list[Any]) -> Path:
    """`NAME/NAME.json` and an image of one colour for each name that the rows have."""
    (folder / name / "images").mkdir(parents=True, exist_ok=True)
    meta = {"task_instruction": ["Look at the pictures, then answer."], "question_type": kind, "dataset": name}
    write_json(folder / name / f"{name}.json", {"meta_data": meta, "data": rows})
    for instance in (row["task_instance"] for row in rows):
        for file in instance["images_path"]:
            colour = tuple(file.encode()[:3])
            height = 16 + 8 * (len(file) % 2)
            Image.new("RGB", (16, height), colour).save(folder / name / "images" / file)
    return folder
