"""A method: who observes the prompt, how the observations are pooled, and what is kept within the budget.

`prefill -> observe -> select -> decode`: a method is a small frozen dataclass that names its parts, holds no state,
and may be used for any number of prompts and models.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.cache import keep
from keepsight.runtime.decode import Kept, decode
from keepsight.runtime.importance import pool, reduce_group, top_entries
from keepsight.runtime.prefill import Prefilled, prefill


class Observer(Protocol):
    """Scores a prompt's entries for a method."""

    def __call__(self, model: PreTrainedModel, prefilled: Prefilled) -> list[Tensor]:
        """For each layer, [B, H, N] float32 by query head (or [B, K, N] by KV head): higher is more important."""
        ...


class Method(ABC):
    """What `generate`, `model.generate(custom_generate=...)` and the evaluation run."""

    @abstractmethod
    def compress(self, model: PreTrainedModel, prefilled: Prefilled) -> Kept:
        """The entries to decode from; `prefilled` stays as it is."""

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """The hook that transformers calls: `model.generate(**inputs, custom_generate=method)`.

        Returns:
            [B, N + T] int64: prompt and answer, as `model.generate` returns them.
        """
        prefilled = prefill(
            model, input_ids, model_kwargs.get("attention_mask"), chunk=generation_config.prefill_chunk_size
        )
        pad = generation_config.pad_token_id
        return decode(
            model,
            self.compress(model, prefilled),
            stopping_criteria,
            pad_token=0 if pad is None else int(pad),
            prompt_ids=input_ids,
            logits_processor=logits_processor,
            do_sample=bool(generation_config.do_sample),
            streamer=streamer,
        )


@dataclass(frozen=True)
class FullCache(Method):
    """Evicts nothing: the reference that every other method is compared with."""

    @override
    def compress(self, model: PreTrainedModel, prefilled: Prefilled) -> Kept:
        return Kept(prefilled.cache, prefilled.mask, prefilled.logits, prefilled.lengths).copy()


@dataclass(frozen=True)
class Evict(Method):
    """Keeps the `budget` most important prompt entries of every layer and KV head.

    The budget is absolute: entries per layer and KV head, sinks and window inside it. A ratio (a float between 0 and
    1) stands for `round(ratio * N)`, N being the longest prompt of the batch. A prompt no longer than the budget is
    left untouched. Generated tokens come on top and are never evicted.

    Attributes:
        budget: Entries to keep.
        observer: Scores the prompt's entries.
        group: How the query heads of a KV head are reduced: `mean` or `max`.
        pooling: `max` or `avg` over `kernel` neighbours, after the group's reduction.
        kernel: Odd; 1 turns pooling off.
        sinks: First entries that are always kept.
        window: Last entries that are always kept; they are not pooled with the others.

    Raises:
        UserError: a value is out of range; one line names it.
    """

    budget: int | float
    observer: Observer
    group: str = "mean"
    pooling: str = "max"
    kernel: int = 7
    sinks: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        name = type(self).__name__
        if type(self.budget) not in (int, float):
            raise UserError(f"{name}: budget {self.budget!r} must be a whole number of entries, or a ratio")
        for field in ("kernel", "sinks", "window"):
            if type(getattr(self, field)) is not int or getattr(self, field) < 0:
                raise UserError(f"{name}: {field} {getattr(self, field)!r} must be a whole number")
        protected = self.sinks + self.window
        if isinstance(self.budget, float) and not 0 < self.budget <= 1:
            raise UserError(f"{name}: budget {self.budget} is not a ratio in (0, 1]; give entries as a whole number")
        if isinstance(self.budget, int) and self.budget < 1:
            raise UserError(f"{name}: budget {self.budget} is below 1; give the entries to keep per layer and KV head")
        if isinstance(self.budget, int) and protected and self.budget <= protected:
            raise UserError(
                f"{name}: budget {self.budget} must be above the {protected} protected entries (sinks + window)"
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UserError(f"{name}: kernel {self.kernel} must be odd and at least 1, or entries and scores shift")
        for field, value, known in (("group", self.group, ("mean", "max")), ("pooling", self.pooling, ("max", "avg"))):
            if value not in known:
                raise UserError(f"{name}: {field} {value!r} is unknown; choose one of {', '.join(known)}")

    @override
    def compress(self, model: PreTrainedModel, prefilled: Prefilled) -> Kept:
        if self.entries(prefilled) >= prefilled.length:
            return FullCache().compress(model, prefilled)
        return self.keep(prefilled, self.importance(model, prefilled))

    def entries(self, prefilled: Prefilled) -> int:
        """The budget in entries for this prompt."""
        if isinstance(self.budget, int):
            return self.budget
        return max(round(self.budget * prefilled.length), self.sinks + self.window + 1)

    @torch.no_grad()
    def importance(self, model: PreTrainedModel, prefilled: Prefilled) -> list[Tensor]:
        """For each layer, the pooled importance [B, K, N] float32: +inf where protected, -inf for padding.

        One call serves every budget.
        """
        kv_heads = prefilled.cache.layers[0].keys.shape[1]  # type: ignore[union-attr]
        return [
            self._protect(reduce_group(observed, kv_heads, self.group), prefilled)
            for observed in self.observer(model, prefilled)
        ]

    def keep(self, prefilled: Prefilled, importance: list[Tensor]) -> Kept:
        """Select within the budget and gather what was selected."""
        return self.gather(prefilled, self.select(prefilled, importance))

    def select(self, prefilled: Prefilled, importance: list[Tensor]) -> list[Tensor]:
        """For each layer, the kept entries [B, K, C] int64 in ascending order; ties go to the lowest index."""
        return [top_entries(layer, min(self.entries(prefilled), prefilled.length)) for layer in importance]

    def gather(self, prefilled: Prefilled, selected: list[Tensor]) -> Kept:
        """A cache of the selected entries. Rows shorter than the budget keep padding, which is masked."""
        mask = None
        if prefilled.mask is not None:
            mask = prefilled.mask.gather(1, selected[0][:, 0])
            mask = None if mask.all() else mask
        return Kept(keep(prefilled.cache, selected), mask, prefilled.logits, prefilled.lengths)

    def _protect(self, importance: Tensor, prefilled: Prefilled) -> Tensor:
        length, pooled = prefilled.length, importance.clone()
        free = length - self.window
        pooled[..., :free] = pool(importance[..., :free].contiguous(), self.kernel, self.pooling)
        pooled[..., free:] = torch.inf
        if prefilled.mask is None:
            pooled[..., : self.sinks] = torch.inf
            return pooled
        order = prefilled.mask.long().cumsum(dim=1)
        pooled.masked_fill_((order <= self.sinks)[:, None], torch.inf)
        return pooled.masked_fill_(~prefilled.mask[:, None], -torch.inf)
