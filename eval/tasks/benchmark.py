"""What a benchmark is: the keys that an evaluation takes for it, and the samples of each of its tasks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from keepsight.errors import UserError
from keepsight.eval.tasks.protocols import REFERENCE, Protocol
from keepsight.eval.tasks.samples import RenderedSample


def no_images() -> Any:
    """Where nothing reads images."""
    raise UserError("tasks with images are not possible here; evaluate them with keepsight eval")


@dataclass(frozen=True)
class TaskRequest:
    """What an evaluation asks of every task.

    Attributes:
        tokenizer: The target's.
        context: Longest sequence that the target reads, in tokens.
        lengths: Lengths of generated prompts in tokens, chat template and answer included.
        samples: Number of samples of a task, at each length of a generated one; 0 for all of a fixed one.
        seed: Same seed, same generated samples.
        max_tokens: Longest prompt of fixed samples that are not cut, in tokens; longer ones are left out.
        every_question: Whether all questions that a context can be asked become samples (`question=multi`).
        protocol: Whose prompts, truncation and post-processing to follow.
        judge: `Judge.name` of who scores answers that no metric can; empty for nobody.
        processor: Loads the target's processor of images, or refuses one that reads none.
        notes: Filled by the tasks: where a text came from, and what was left out. Results are shown with them.
    """

    tokenizer: Any
    context: int
    lengths: Sequence[int] = (1024,)
    samples: int = 20
    seed: int = 1000
    max_tokens: int = 2048
    every_question: bool = False
    protocol: Protocol = REFERENCE
    judge: str = ""
    processor: Callable[[], Any] = no_images
    notes: dict[str, str] = field(default_factory=dict)


@dataclass
class Benchmark(ABC):
    """Several tasks under one name, such as `ruler` with `ruler_vt`; its fields are the command's keys `ruler.KEY`."""

    TASKS: ClassVar[tuple[str, ...]] = ("",)
    """Names of the tasks, each without the benchmark's; one of no name for a benchmark that is one task."""

    def groups(self, protocol: Protocol) -> Mapping[str, Sequence[str]]:
        """What each name that stands for several tasks stands for; the empty one is the benchmark's own."""
        return {"": self.TASKS}

    @abstractmethod
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        """The samples of one task, by its name in `TASKS`."""
