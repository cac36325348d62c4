"""Conversations: each turn continues from the state after the last answer."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.chat import ids_of
from keepsight.models.decoder import context_of
from keepsight.models.model_files import adapters_digest
from keepsight.runtime.generate import CustomGenerate, Decoded, GenerateRequest, Method, decode, generate
from keepsight.runtime.state import State


class Conversation(CustomGenerate):
    """Several turns over one cache.

    The first turn is what `generate` does. Each later turn is read after the entries still in the cache, at the
    positions that a full cache would use, and then the method is applied to the whole cache again, observing from the
    turn's end: before every answer the cache holds at most the method's budget, however long the conversation. A ratio
    counts all tokens so far. Methods that shorten the prompt do so at the first turn only, and methods that pack
    entries evict at the first turn only. Evicted entries are gone for good.

    Args:
        model: The base model.
        method: The method, such as `SnapKV(budget=128)`.
        state: State to continue from, such as a loaded one; it stays unchanged, so that several conversations can
            start from it. None to start with an empty cache.

    Attributes:
        ids: [1, M] int64: all turns and answers so far.
        state: State after all of `ids` but the last answer's last token; None before the first turn.

    Raises:
        UserError: the state is a batch, or one whose method stores entries in its own form.
    """

    def __init__(self, model: PreTrainedModel, method: Method, state: State | None = None) -> None:
        self.model, self.method, self.state = model, method, state
        self.ids = torch.empty(1, 0, dtype=torch.long, device=model.device) if state is None else state.tokens
        self._unread = self.ids[:, :0]
        self._adapters: str | None = None
        _require_single(self.ids)
        if state is not None and not state.joins:
            raise UserError(
                "conversation: the state's method stores entries in its own form (kivi, specache, specontext, quest, "
                "exact_topk); give the state that it was made from"
            )

    def say(self, input_ids: Tensor | Mapping[str, Any] | str, **options: Any) -> Tensor:
        """Add a turn and answer it. When this raises, the conversation stays as it was.

        Args:
            input_ids: [1, n] int64, n >= 1: the tokens after the last answer, whose end token belongs to the answer. Of
                a chat that was rendered whole, give `rendered[:, conversation.ids.shape[1]:]`. Or as for `generate`.
            options: Options of `model.generate`: `max_new_tokens`, `do_sample`, `temperature`, `streamer`, ...
                Penalties and streamers see the whole conversation as the prompt.

        Returns:
            [1, T] int64: the answer alone.

        Raises:
            UserError: the turn is a batch, or empty.
        """
        input_ids = ids_of(self.model, input_ids, options, special=not self.ids.shape[1])
        options.pop("attention_mask", None)  # there is no padding
        _require_single(input_ids)
        if not input_ids.shape[1]:
            raise UserError("conversation: the turn has no tokens; give at least one, such as the user's next message")
        prompt = torch.cat([self.ids, input_ids.to(self.ids.device)], dim=1)
        return generate(self.model, prompt, self, **options)

    @override
    def answer(self, model: PreTrainedModel, request: GenerateRequest) -> Decoded:
        """Answer the last turn; `say` calls it by way of transformers."""
        _require_single(request.input_ids)
        if request.past is not None:
            raise UserError("conversation: it continues from its own cache; leave out past_key_values")
        if self._adapters not in (None, adapters := adapters_digest(model)):
            raise UserError("conversation: the model has other active adapters than at the last turn; activate those")
        state = self._read(request.input_ids, request.chunk)
        reader, eviction = self.method.reader(model), self.method.periodic_eviction(model)
        restart = functools.partial(self.method.restart, model)
        decoded = decode(reader, state, eviction=eviction, restart=restart, **request.decoding)
        self.state, self.ids, self._unread = decoded.state, decoded.ids, decoded.ids[:, -1:]
        self._adapters = adapters
        return decoded

    def _read(self, prompt: Tensor, chunk: int | None) -> State:
        """The state to answer from, within the budget."""
        if self.state is None:
            self.method.check(prompt.shape[1], context_of(self.model))
            return self.method.start(self.model, prompt, chunk=chunk)
        unread = torch.cat([self._unread, prompt[:, self.ids.shape[1] :]], dim=1)
        return self.method.resume(self.model, self.state, unread, chunk=chunk)


def _require_single(ids: Tensor) -> None:
    if ids.dim() != 2 or len(ids) != 1:
        raise UserError(
            f"conversation: ids of shape {list(ids.shape)} are not one sequence [1, n]; "
            "use one conversation per row, and give neither beams nor num_return_sequences"
        )
