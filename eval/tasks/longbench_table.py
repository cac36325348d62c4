"""LongBench's tasks as its repository describes them: templates, generation lengths and metrics."""

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import yaml

LAYOUT = "longbench"


@dataclass(frozen=True)
class LongBenchTask:
    """One task; its prompt is `before`, `question` and `cue`, in which {context} and {input} are filled in.

    Attributes:
        before: What stands before the question, {context} included.
        question: What is asked.
        cue: What ends the prompt, such as `Answer:`; a question that is {input} alone holds it already.
        tokens: Generation length.
        metric: A key of `keepsight.eval.tasks.metrics.METRICS`.
    """

    before: str
    question: str
    cue: str
    tokens: int
    metric: str

    @property
    def is_cue_in_input(self) -> bool:
        """Whether the rows' own field ends with the cue, as in the few-shot tasks."""
        return self.question == "{input}" and not self.metric.startswith("code")

    @property
    def template(self) -> str:
        """The whole prompt."""
        return self.before + self.question + ("" if self.is_cue_in_input else self.cue)


@lru_cache(maxsize=1)
def longbench_tasks() -> dict[str, LongBenchTask]:
    """All tasks by name, the 16 English ones first."""
    text = (files("keepsight.eval.tasks") / "longbench.yaml").read_text(encoding="utf-8")
    return {name: LongBenchTask(**entry) for name, entry in yaml.safe_load(text).items()}


def longbench_entries() -> dict[str, Any]:
    """The tasks in the form of a `tasks.json`; see `keepsight.eval.tasks.task_files`."""
    return {
        name: {"layout": LAYOUT, "prompt": task.template, "metric": task.metric, "max_new_tokens": task.tokens}
        for name, task in longbench_tasks().items()
    }
