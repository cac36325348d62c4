"""keepsight's methods as a model of lm-evaluation-harness (extra `lm-eval`), in its registry as `keepsight`.

A request's context is what a method compresses; continuations are scored, and answers generated, from the kept entries.
Requests that follow each other with one context, such as the choices of a question, share one compressed cache.
"""

# pyright: reportMissingImports=false

import importlib
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from transformers.generation import StoppingCriteria
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.answers import answer_likelihood
from keepsight.models.answer_text import AnswerText
from keepsight.models.chat import chat_text, encode
from keepsight.models.decoder import context_of
from keepsight.models.draft_sources import DraftSource, LayerSubset, named_draft
from keepsight.models.model_files import packaged_of
from keepsight.models.targets import load_target
from keepsight.progress import progress_bar
from keepsight.runtime.generate import generate
from keepsight.runtime.methods import Resources, make_method

# The registry takes in the harness's own models only as long as it is empty.
importlib.import_module("lm_eval.models")

_MAX_NEW_TOKENS = 256
"""The harness's own default."""
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")
"""Options of no effect where nothing is sampled; tasks give them with do_sample: false."""


@register_model("keepsight")
class HarnessModel(TemplateLM):
    """A base model under one method; the arguments come from `--model_args`.

    Args:
        pretrained: Hub id or local folder of the base model; a recipe's packaged file is used if it is installed.
        method: Name of the method, such as snapkv; full for the full cache.
        budget: KV entries per layer and KV head, or a ratio of the prompt such as 0.1.
        adapter: Lookahead adapter: a folder or Hub id.
        retrieval: Retrieval head: a folder or Hub id.
        draft: Draft model: a Hub id or folder, or indices of the base model's layers joined by `+`, such as 0+1+5.
        revision: Branch, tag or commit of the base model.
        dtype: auto, float32, bfloat16 or float16.
        device: auto, cpu, cuda, ...; the harness gives its own `--device`, cuda:0 by default: the CPU without a GPU.
        attention: auto, sdpa, eager, or flash_attention_2, _3 or _4 (experimental).
        chat_template: A Jinja file with the chat template for `--apply_chat_template`; the tokenizer's by default.
        max_length: Longest context with its answer, in tokens; the base model's by default. Longer contexts lose their
            beginning, as with the harness's own models.
        batch_size: Must be 1: contexts are compressed one at a time.
        max_batch_size: Not used.
        options: Further fields of the method, such as window=16.

    Raises:
        UserError: the base model or the method cannot be loaded, or a value is not valid.
    """

    def __init__(
        self,
        pretrained: str,
        method: str = "full",
        budget: int | float | None = None,
        adapter: str | None = None,
        retrieval: str | None = None,
        draft: str | None = None,
        revision: str | None = None,
        dtype: str = "auto",
        device: str | None = "auto",
        attention: str = "auto",
        chat_template: str | None = None,
        max_length: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if str(batch_size) not in ("1", "auto"):
            raise UserError(
                f"batch_size={batch_size} must be 1: contexts are compressed one at a time",
                field="batch_size",
                code="conflict",
            )
        if str(device).startswith("cuda") and not torch.cuda.is_available():  # the harness's own default is cuda:0
            print(f"device={device}: this machine has no GPU that torch can use; running on the CPU", file=sys.stderr)
            device = "cpu"
        loading: dict[str, Any] = {"dtype": dtype, "device": device or "auto", "attention": attention}
        files = {"revision": revision, "chat_template": chat_template, **packaged_of(pretrained)}
        try:
            self.target = load_target(pretrained, **files, **loading)
        except UserError as error:
            raise _in_the_harness(error) from None
        self.model = self.target.model
        self.tokenizer: Any = self.target.tokenizer
        self._device = self.model.device

        def find_draft() -> DraftSource | None:
            if draft is None:
                return None
            layers = str(draft).split("+")
            if all(layer.isdigit() for layer in layers):
                return LayerSubset(tuple(map(int, layers)))
            return named_draft(draft, self.target, **loading)

        resources = Resources(adapter, find_draft, self.tokenizer, retrieval, self.model)
        self.method = make_method(method, budget, resources, **options)
        self.max_length = max_length or context_of(self.model)

    @property
    @override
    def eot_token_id(self) -> int:
        return self.target.end_tokens[0]

    @property
    @override
    def prefix_token_id(self) -> int:
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    @override
    def tokenizer_name(self) -> str:
        return self.target.name.replace("/", "__")

    @override
    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        ending: dict[str, Any] = {}
        if not add_generation_prompt:
            ending = {"add_generation_prompt": False, "continue_final_message": True}
        try:
            return chat_text(self.tokenizer, chat_history, **ending)
        except UserError as error:
            raise _in_the_harness(error) from None

    @override
    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        (ids,) = encode(self.tokenizer, [string], special=add_special_tokens is not False)
        return ids

    @override
    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        raise UserError(
            "the task asks for the likelihood of whole texts, before which there is nothing to compress: "
            "choose one that has a context and an answer",
            field="task",
            code="conflict",
        )

    @override
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scored_requests = []
        total = len(requests)
        with progress_bar(total=total, name="loglikelihood", unit="request", shown=not disable_tqdm) as progress:
            for _, group in groupby(requests, lambda request: request[1]):
                for request, scored in self._score(list(group)):
                    self.cache_hook.add_partial("loglikelihood", request, scored)
                    scored_requests.append(scored)
                    progress.update()
        return scored_requests

    def _score(self, group: Sequence[tuple[Any, list[int], list[int]]]) -> Iterator[tuple[Any, tuple[float, bool]]]:
        """The log-likelihood in nats of each continuation of a context, and whether it is the greedy one."""
        longest = max(len(continuation) for _, _, continuation in group)
        prompt = self._fitting(group[0][1], longest)
        state = self.method.start(self.model, prompt)
        for request, _, continuation in group:
            if not continuation:
                yield request, (0.0, True)
                continue
            answer = torch.tensor([continuation], device=self.device)
            reader = self.method.reader(self.model)
            eviction = self.method.periodic_eviction(self.model)
            nll, hits = answer_likelihood(reader, state.copy(), answer, eviction)
            yield request, (-nll.sum().item(), bool(hits.all()))

    def _fitting(self, context: list[int], answer_tokens: int) -> Tensor:
        """[1, N] int64: the end of the context that fits before the answer; of an empty one the prefix token."""
        room = self.max_length - answer_tokens
        if room < 1:
            raise UserError(
                f"an answer of {answer_tokens} tokens leaves no room in max_length={self.max_length}",
                field="max_length",
                code="range",
            )
        ids = torch.tensor([(context or [self.prefix_token_id])[-room:]], device=self.device)
        self.method.check(ids.shape[1], self.max_length)
        return ids

    @override
    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        answers = []
        for request in progress_bar(requests, name="generate_until", unit="request", shown=not disable_tqdm):
            context, asked = request.args
            options = dict[str, Any](normalize_gen_kwargs(asked, _MAX_NEW_TOKENS))
            stops = _stops_of(options.pop("until"))
            tokens = options.pop("max_gen_toks")
            if not options["do_sample"]:
                options = {name: value for name, value in options.items() if name not in _OF_SAMPLING}
            prompt = self._fitting(self.tok_encode(context), tokens)
            answer = _Answer(AnswerText(self.tokenizer, stops), prompt.shape[1])
            generate(self.model, prompt, self.method, max_new_tokens=tokens, stopping_criteria=[answer], **options)
            answer.text.finish()
            self.cache_hook.add_partial("generate_until", request.args, answer.text.text)
            answers.append(answer.text.text)
        return answers


class _Answer(StoppingCriteria):
    """Reads the answer to one prompt of `prompt_tokens` tokens while it grows, and stops it at its first stop."""

    def __init__(self, text: AnswerText, prompt_tokens: int) -> None:
        self.text = text
        self._read = prompt_tokens

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Any:
        for token in input_ids[0, self._read :].tolist():
            self.text.add(token)
        self._read = input_ids.shape[1]
        return torch.tensor([self.text.has_stopped], device=input_ids.device)


def _in_the_harness(error: UserError) -> UserError:
    """The error with the harness's names of the keys that keepsight's own commands have."""
    message = str(error).replace("model.id=", "pretrained=").replace("model.chat_template=", "chat_template=")
    return error.reworded(message)


def _stops_of(until: list[Any]) -> list[str]:
    """The stops of a task; empty ones are left out, as the harness does. UserError for one that is no text."""
    stops = [stop for stop in until if stop]
    if wrong := [stop for stop in stops if not isinstance(stop, str)]:
        raise UserError(
            f"until: {wrong[0]!r} is no text; give generation_kwargs texts to stop at", field="until", code="type"
        )
    return stops
