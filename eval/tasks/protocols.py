"""Whose conventions a benchmark follows: its authors', or those of another repository whose tables are to be compared.

Only what is known to change scores is described: truncation, chat template, generation lengths, the place of the answer
prefix, and what is done to an answer before it is scored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from keepsight.errors import UserError

_NO_TEMPLATE = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
_SYNTHETIC = frozenset({"passage_count", "passage_retrieval_en"})
_QA = frozenset({"qa_1", "qa_2"})
RULER_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}


@dataclass(frozen=True)
class Protocol:
    """The conventions of one repository.

    Attributes:
        truncate: Whether LongBench prompts that are too long lose their middle; otherwise they are left out.
        limits: Longest LongBench prompt in tokens, by part of the model's name; other models take their context.
        no_template: LongBench tasks that are given to the model without its chat template.
        templated: Parts of the names of models whose chat template LongBench's other tasks go through; "" for all.
        always_templated: Parts of the names of models whose chat template all of LongBench goes through.
        left_out: Tasks that the repository's mean is taken without.
        extra_tokens: What LongBench's generation lengths are raised by.
        cue_after: Whether the end of a LongBench prompt, such as `Answer:`, begins the assistant's turn.
        system: System prompt of LongBench for models whose chat template has none of its own.
        shuffled: Whether a part of a fixed task's samples is drawn with seed 42, not the first ones.
        clean: What is done to LongBench's answers, a key of `keepsight.eval.tasks.metrics.CLEAN`.
        ruler_clean: The same for RULER.
        ruler_tokens: Generation lengths of RULER by family.
        ruler_prefix: Where RULER's answer prefix stands: it begins the answer, ends the prompt, or is left out.
        ruler_template: Whether RULER's prompts go through the chat template.
    """

    truncate: bool = True
    limits: Mapping[str, int] = field(default_factory=dict)
    no_template: frozenset[str] = _NO_TEMPLATE
    templated: tuple[str, ...] = ("",)
    always_templated: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()
    extra_tokens: int = 0
    cue_after: bool = False
    system: str = ""
    shuffled: bool = False
    clean: str = "none"
    ruler_clean: str = "none"
    ruler_tokens: Mapping[str, int] = field(default_factory=lambda: RULER_TOKENS)
    ruler_prefix: Literal["answer", "prompt", "none"] = "answer"
    ruler_template: bool = True

    def limit_of(self, model: str) -> int | None:
        """The longest LongBench prompt of a model of this name; None for its context."""
        return next((limit for part, limit in self.limits.items() if part in model.lower()), None)

    def is_chat(self, task: str, model: str) -> bool:
        """Whether a LongBench task goes through the chat template of a model of this name."""
        parts = (*self.always_templated, *(() if task in self.no_template else self.templated))
        return any(part in model.lower() for part in parts)


REFERENCE = Protocol()

PROTOCOLS = {
    "reference": REFERENCE,
    # Zefan-Cai/KVCache-Factory: run_longbench.py, run_ruler.py.
    "kvcache-factory": Protocol(
        limits={"llama-3": 7500, "llama3": 7500, "llama-2": 3950, "llama2": 3950, "mistral": 31500},
        templated=("llama",),
        left_out=_QA,
        ruler_tokens=dict.fromkeys(RULER_TOKENS, 64),
        ruler_prefix="prompt",
        ruler_template=False,
    ),
    # NVIDIA/kvpress: evaluation/; its own default also hides the question, which here is question=unseen.
    "kvpress": Protocol(
        truncate=False,
        no_template=frozenset(),
        extra_tokens=20,
        cue_after=True,
        clean="left_stripped",
        ruler_clean="no_control_characters",
    ),
    # furiosa-ai/draft-based-approx-llm, the repository of SpecKV and SpecPC.
    "draft-based": Protocol(
        truncate=False,
        always_templated=("qwen3",),
        left_out=_SYNTHETIC,
        system=(
            "A chat between a curious human and an artificial intelligence assistant. "
            "The assistant gives helpful, detailed, and polite answers to the human's questions."
        ),
        shuffled=True,
        clean="after_last_tag",
        ruler_clean="after_last_tag",
        ruler_tokens={"niah": 128, "vt": 64, "cwe": 120, "fwe": 64, "qa": 64},
        ruler_prefix="none",
    ),
}


def protocol_named(name: str) -> Protocol:
    """A protocol by its name.

    Raises:
        UserError: there is no such protocol.
    """
    if name not in PROTOCOLS:
        raise UserError(f"protocol={name} is unknown; choose one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]
