"""MileBench (arXiv 2404.18532): questions about several images, from a folder in its own layout.

Each data set is a folder `NAME` with `NAME.json` and `images/`. Prompts as in https://github.com/MileBench/MileBench,
`utils.py`: the task's instruction, then the context with its images in their places, then the choices. What does not
fit the target's context is left out and counted; the reference cuts its beginning.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, TaskRequest
from keepsight.eval.tasks.milebench_metrics import plain
from keepsight.eval.tasks.pictures import render_pictured
from keepsight.eval.tasks.rows import bucket, text_field, texts_field
from keepsight.eval.tasks.samples import RenderedSample, Sample
from keepsight.files import read_json

_TOKENS = 512
_METRICS = {"multi-choice": "milebench_choice", "open-ended": "milebench_rouge_l"}


@dataclass
class MileBench(Benchmark):
    """MileBench's data sets as milebench_NAME, such as milebench_EgocentricNavigation.

    Attributes:
        dir: Folder that holds a folder for each data set.
    """

    dir: str | None = None

    @override
    def groups(self, protocol: Any) -> Mapping[str, Sequence[str]]:
        if self.dir is None:
            raise UserError("milebench tasks need milebench.dir=FOLDER with MileBench's folders, such as SlideVQA")
        found = sorted(path.stem for path in Path(self.dir).glob("*/*.json") if path.stem == path.parent.name)
        if not found:
            raise UserError(f"milebench.dir={self.dir}: no NAME/NAME.json there, such as SlideVQA/SlideVQA.json")
        return {"": found, **{name: [name] for name in found}}

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        data = _DataSet.read(Path(self.dir or ""), task)
        processor, left_out, made = request.processor(), 0, list[RenderedSample]()
        for sample, parts in data.samples():
            if len(made) == request.samples > 0:
                break
            rendered = render_pictured(sample, parts, request.tokenizer, processor)
            length = len(rendered.prompt_ids)
            if length + sample.max_new_tokens > request.context:
                left_out += 1
            else:
                made.append(replace(rendered, length=bucket(length)))
        if left_out:
            request.notes[sample.task] = f"{left_out} samples do not fit the context of {request.context} tokens"
        return made


@dataclass(frozen=True)
class _DataSet:
    """A data set: its name, file, metric, instructions by their ids, and rows."""

    name: str
    path: Path
    metric: str
    instructions: Any
    rows: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path, name: str) -> "_DataSet":
        path = folder / name / f"{name}.json"
        value = read_json(path)
        try:
            meta, rows = value["meta_data"], value["data"]
            instructions, kind = meta["task_instruction"], meta["question_type"]
            metric = _metric(name, kind)
        except (KeyError, TypeError):
            raise UserError(
                f"{path}: expected data, and meta_data with task_instruction and a question_type of "
                f"{' or '.join(_METRICS)}, as MileBench has them"
            ) from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise UserError(f"{path}: data must be a list of objects")
        return cls(name, path, metric, instructions, rows)

    def samples(self) -> Iterator[tuple[Sample, list[str | Path]]]:
        """Each sample, and the texts and image files of its prompt."""
        for place, row in enumerate(self.rows):
            where, instance = f"{self.path}: data[{place}]", row.get("task_instance")
            if not isinstance(instance, dict):
                raise UserError(f"{where}: task_instance must be an object with context and images_path")
            choices = texts_field(where, instance, "choice_list") if "choice_list" in instance else ()
            text = f"{self._instruction(where, row)}\n{text_field(where, instance, 'context')}{self._list(choices)}"
            images = [self.path.parent / "images" / each for each in texts_field(where, instance, "images_path")]
            if missing := next((each for each in images if not each.is_file()), None):
                raise UserError(f"{where}: its image {missing} is missing; unpack all of MileBench's archives")
            response = str(row.get("response", ""))
            if not plain(response):
                raise UserError(f"{where}: response is empty or missing, so that no answer can be scored")
            if self.metric == "milebench_choice" and plain(response) not in map(plain, choices):
                raise UserError(f"{where}: response {response[:60]!r} must be one of choice_list")
            yield (
                Sample(
                    id=str(row.get("sample_id", place)),
                    task=f"milebench_{self.name}",
                    length=0,
                    prompt=text,
                    references=(response,),
                    metric=self.metric,
                    max_new_tokens=_TOKENS,
                    classes=choices,
                ),
                _parts(where, text, images),
            )

    def _instruction(self, where: str, row: Mapping[str, Any]) -> str:
        number = row.get("task_instruction_id")
        try:
            return str(self.instructions[number])
        except (IndexError, KeyError, TypeError):
            raise UserError(f"{where}: meta_data has no task_instruction {number!r}") from None

    def _list(self, choices: Sequence[str]) -> str:
        """The choices as the prompt shows them; GPR1200 has more of them than there are letters."""
        if not choices:
            return ""
        letters = ["" if self.name == "GPR1200" else f"{chr(ord('A') + place)}. " for place in range(len(choices))]
        lettered = [letter + choice for letter, choice in zip(letters, choices, strict=True)]
        return "\n".join(["\nChoice list: ", *lettered, "Your answer is: "])


def _metric(name: str, kind: str) -> str:
    if "NeedleInAHaystack" in name:
        return "milebench_word"
    return "milebench_text" if "MMCoQA" in name else _METRICS[kind]


def _parts(where: str, text: str, images: Sequence[Path]) -> list[str | Path]:
    """The text with the images in the places such as {image#1} and {table#1}, in the order of the text."""
    texts = re.split(r"\{(?:image|table)#\d+\}", text)
    if len(texts) != len(images) + 1:
        places = len(texts) - 1
        raise UserError(f"{where}: {len(images)} images have {places} places such as {{image#1}} in the context")
    parts: list[str | Path] = [texts[0]]
    for image, after in zip(images, texts[1:], strict=True):
        parts += [image, after]
    return [part for part in parts if part]
