"""MileBench (arXiv:2404.18532): questions about several images, from a folder in its own layout.

Each data set is a folder `NAME` with `NAME.json` and `images/`. Prompts and metrics as in
https://github.com/MileBench/MileBench, `utils.py` and `evaluate.py`: the task's instruction, then the context with its
images in their places, then the choices. A prompt that does not fit the context is left out and counted; the reference
cuts its beginning.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, Protocol, TaskRequest, text_field, texts_field
from keepsight.eval.tasks.metrics import metric, rouge_l, sample_metric
from keepsight.eval.tasks.samples import RenderedSample, Sample
from keepsight.eval.tasks.task_format import TaskEntry, TaskRow, load
from keepsight.files import JsonObject, read_json

_TOKENS = 512
_METRICS = {"multi-choice": "milebench_choice", "open-ended": "milebench_rouge_l"}


@dataclass
class MileBench(Benchmark):
    """MileBench's data sets as milebench_NAME, such as milebench_EgocentricNavigation.

    Attributes:
        dir: Folder with a subfolder for each data set.
    """

    dir: str | None = None

    @override
    def groups(self, protocol: Protocol) -> Mapping[str, Sequence[str]]:
        if self.dir is None:
            raise UserError(
                "milebench tasks need milebench.dir=FOLDER with MileBench's folders, such as SlideVQA",
                field="milebench.dir",
                code="missing",
            )
        names = []
        for path in sorted(Path(self.dir).glob("*/*.json")):
            if path.stem == path.parent.name:
                names.append(path.stem)
        if not names:
            raise UserError(
                f"milebench.dir={self.dir}: no NAME/NAME.json there, such as SlideVQA/SlideVQA.json",
                field="milebench.dir",
                code="missing",
            )
        groups = {"": names}
        for name in names:
            groups[name] = [name]
        return groups

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        path = Path(self.dir or "") / task / f"{task}.json"
        processor = request.processor()
        instructions, metric_name, rows = _data_set(path)

        def convert(where: str, row: JsonObject, number: int) -> TaskRow:
            instance = row.get("task_instance")
            if not isinstance(instance, dict):
                raise UserError(
                    f"{where}: task_instance must be an object with context and images_path",
                    field="task_instance",
                    code="type",
                )
            choices = texts_field(where, instance, "choice_list") if "choice_list" in instance else ()
            text = f"{_instruction(where, instructions, row)}\n{text_field(where, instance, 'context')}"
            text += _choice_list(task, choices)
            images = _image_files(where, path.parent / "images", texts_field(where, instance, "images_path"))
            return TaskRow(
                id=str(row.get("sample_id", number)),
                fields={"input": text},
                references=(_response(where, row, metric_name, choices),),
                classes=choices,
                parts=tuple(_parts(where, text, images)),
            )

        entry = TaskEntry(f"milebench_{task}", "{input}", metric_name, _TOKENS)
        return load(entry.task, entry, rows, convert, request, processor=processor)


def _image_files(where: str, folder: Path, names: Sequence[str]) -> list[Path]:
    """The image files of a row; UserError for one that is missing, or outside of the folder."""
    root = Path(os.path.normpath(folder))
    images = [Path(os.path.normpath(root / name)) for name in names]
    for image in images:
        if not image.is_relative_to(root):
            raise UserError(
                f"{where}: its image {image} is outside of {root}; unpack MileBench's archives again",
                field="image",
                code="file",
            )
    for image in images:
        if not image.is_file():
            raise UserError(
                f"{where}: its image {image} is missing; unpack all of MileBench's archives",
                field="image",
                code="missing",
            )
    return images


def _data_set(path: Path) -> tuple[Any, str, list[tuple[str, JsonObject]]]:
    """The instructions of a data set's file, its metric, and its rows with their places."""
    value = read_json(path)
    try:
        instructions = value["meta_data"]["task_instruction"]
        question_type = value["meta_data"]["question_type"]
        if "NeedleInAHaystack" in path.stem:
            metric_name = "milebench_word"
        elif "MMCoQA" in path.stem:
            metric_name = "milebench_text"
        else:
            metric_name = _METRICS[question_type]
        rows = value["data"]
    except (KeyError, TypeError):
        kinds = " or ".join(_METRICS)
        layout = f"data, and meta_data with task_instruction and a question_type of {kinds}, as MileBench has them"
        raise UserError(f"{path}: expected {layout}", field=path.name, code="type") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: data must be a list of objects", field="data", code="type")
    return instructions, metric_name, [(f"{path}: data[{index}]", row) for index, row in enumerate(rows)]


def _response(where: str, row: JsonObject, metric_name: str, choices: Sequence[str]) -> str:
    response = row.get("response")
    text = str(response) if isinstance(response, str | int | float) else ""
    if not plain(text):
        raise UserError(
            f"{where}: response is empty or missing, so that no answer can be scored", field="response", code="missing"
        )
    if metric_name == "milebench_choice" and plain(text) not in map(plain, choices):
        raise UserError(f"{where}: response {text[:60]!r} must be one of choice_list", field="response", code="unknown")
    return text


def _instruction(where: str, instructions: Any, row: JsonObject) -> str:
    number = row.get("task_instruction_id")
    try:
        return str(instructions[number])
    except (IndexError, KeyError, TypeError):
        raise UserError(
            f"{where}: meta_data has no task_instruction {number!r}", field="task_instruction", code="missing"
        ) from None


def _choice_list(name: str, choices: Sequence[str]) -> str:
    """The choices as the prompt shows them; GPR1200 has more of them than there are letters."""
    if not choices:
        return ""
    lines = ["\nChoice list: "]
    for index, choice in enumerate(choices):
        letter = "" if name == "GPR1200" else f"{_letter(index)}. "
        lines.append(letter + choice)
    lines.append("Your answer is: ")
    return "\n".join(lines)


def _letter(index: int) -> str:
    """The letter of a choice, A for the first."""
    return chr(ord("A") + index)


def _parts(where: str, text: str, images: Sequence[Path]) -> list[str | Path]:
    """The text with the images in the places such as {image#1} and {table#1}, in the order of the text."""
    texts = re.split(r"\{(?:image|table)#\d+\}", text)
    if len(texts) != len(images) + 1:
        positions = len(texts) - 1
        raise UserError(
            f"{where}: {len(images)} images have {positions} places such as {{image#1}} in the context",
            field="image",
            code="data",
        )
    parts: list[str | Path] = [texts[0]]
    for image, after in zip(images, texts[1:], strict=True):
        parts += [image, after]
    return list(filter(None, parts))


# The metrics keep the oddities of the reference, since published tables have them.
_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_PERIODS = 32  # it passes a flag of this value where re.sub takes a count


def plain(text: str) -> str:
    """Lower case in one line; marks are spaces, or nothing where they stand beside one."""
    text = text.replace("\n", " ").replace("\t", " ").strip()
    has_commas_in_numbers = re.search(r"\d,\d", text) is not None
    bare = text
    for mark in _MARKS:
        is_beside_space = f"{mark} " in text or f" {mark}" in text
        replacement = "" if is_beside_space or has_commas_in_numbers else " "
        bare = bare.replace(mark, replacement)
    bare = re.sub(r"\.(?!\d)", "", bare, count=_PERIODS)
    return bare.strip("'").strip('"').strip().lower()


def _named_choice(answer: str, choices: Sequence[str]) -> str:
    """The letter of the choice that an answer names, as A for the first; other text where it names none.

    An answer names a choice by letter and text, by its text (which is found only without signs that are special in
    regular expressions, such as the point of 2.5), or by the letter alone. No answer is C.
    """
    answer = plain(answer)
    if not answer:
        return "C"
    letters = list(map(_letter, range(len(choices))))
    with_letters = []
    texts = []
    for letter, choice in zip(letters, choices, strict=True):
        with_letters.append(_escaped(plain(f"{letter} {plain(choice)}")))
        texts.append(_escaped(plain(choice)).replace(" ", ""))

    by_letter_and_text = re.search("|".join(with_letters), answer)
    if by_letter_and_text is not None:
        return by_letter_and_text[0][:1].upper()
    by_text = re.search("|".join(texts), answer.replace(" ", ""))
    if by_text is not None and by_text[0].strip() in texts:
        return letters[texts.index(by_text[0].strip())]
    return "".join(letter for letter in answer.upper() if letter in letters)


@sample_metric("milebench_choice")
def _right_choice(answer: str, sample: Sample) -> float:
    """Whether an answer names the reference among the choices."""
    right = list(map(plain, sample.classes)).index(plain(sample.references[0]))
    return float(_named_choice(answer, sample.classes) == _letter(right))


@metric("milebench_rouge_l")
def _plain_rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L of the plain texts."""
    return rouge_l(plain(answer), plain(reference))


@metric("milebench_word")
def _reference_is_word(answer: str, reference: str) -> float:
    """Needles in a haystack: whether the reference is a word of the answer."""
    return float(plain(reference) in plain(answer).split())


@metric("milebench_text")
def _reference_occurs(answer: str, reference: str) -> float:
    """MMCoQA: whether the reference occurs in the answer."""
    return float(plain(reference) in plain(answer))


def _escaped(text: str) -> str:
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", text)
