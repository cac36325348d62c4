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
from keepsight.models.identity import Identity, adapters_digest
from keepsight.runtime.generate import CustomGenerate, Decoded, GenerateRequest, Method, decode, generate
from keepsight.runtime.rope_length import length_limit
from keepsight.runtime.state import Checkpoint, State


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
        ids: [1, M] int64: all turns and answers so far, as they were read.
        state: State after all of `ids` but the last answer's last token; None before the first turn.

    Raises:
        UserError: the state is a batch, or one whose method stores entries in its own form.
    """

    def __init__(self, model: PreTrainedModel, method: Method, state: State | None = None) -> None:
        self.model = model
        self.method = method
        self.state = state
        if state is None:
            self.ids = torch.empty(1, 0, dtype=torch.long, device=model.device)
        else:
            self.ids = state.tokens
        self._unread = self.ids[:, :0]
        self._before_answer: Checkpoint | None = None
        self._identity = Identity()  # of the model that answered the last turn
        _require_single(self.ids)
        if state is not None and not state.has_plain_entries:
            raise UserError(
                "conversation: the state's method stores entries in its own form (kivi, specache, specontext, quest, "
                "exact_topk); give the state that it was made from",
                field="state",
                code="state",
            )

    def say(self, input_ids: Tensor | Mapping[str, Any] | str, **options: Any) -> Tensor:
        """Add a turn and answer it. When this raises, the conversation stays as it was.

        Args:
            input_ids: [1, n] int64, n >= 1: the tokens after the last answer, whose end token belongs to the answer. Or
                as for `generate`. A chat that is rendered again with each turn goes to `say_rendered`: its tokens may
                differ from the ones in the cache, so it must not be sliced by length.
            options: Options of `model.generate`: `max_new_tokens`, `do_sample`, `temperature`, `streamer`, ...
                Penalties and streamers see the whole conversation as the prompt.

        Returns:
            [1, T] int64: the answer alone.

        Raises:
            UserError: the turn is a batch, or empty, or text that begins as a prompt does.
        """
        turn = self._ids(input_ids, options, special=not self.ids.shape[1])
        prompt = torch.cat([self.ids, turn.to(self.ids.device)], dim=1)
        return generate(self.model, prompt, self, **options)

    def say_rendered(self, input_ids: Tensor | Mapping[str, Any] | str, **options: Any) -> Tensor:
        """Answer a chat that was rendered again, from its first turn to the one to answer.

        Its tokens may differ from those that were read: an answer's text is often tokenized otherwise than the model
        wrote it, and many templates leave out earlier turns' `<think>`. What was read is cropped to the tokens that
        both have in common, and the rest is read on.

        The last answer can be cropped at any token: the state is then as if the rest had never been decoded. Of the
        turn before it, the last 64 tokens can be cropped where all layers have full attention and the method sums
        nothing over tokens (as h2o and expected_attention do). Further back is what evicted entries depended on: a chat
        that differs there is refused, unless nothing was evicted. Methods that store entries in their own form (kivi,
        specache, specontext, quest and others) refuse every difference but the answer's last token.

        Args:
            input_ids: [1, N] int64: the chat. Or as for `generate`.
            options: As for `say`.

        Returns:
            [1, T] int64: the answer alone.

        Raises:
            UserError: the chat differs from what was read where it cannot be cropped; start a new conversation with it.
        """
        chat = self._ids(input_ids, options, special=True)
        return generate(self.model, chat, self, **options)

    def _ids(self, input_ids: Tensor | Mapping[str, Any] | str, options: dict[str, Any], special: bool) -> Tensor:
        ids = ids_of(self.model, input_ids, options, special=special)
        mask = options.pop("attention_mask", None)
        _require_single(ids)
        _require_unpadded(mask)
        if not ids.shape[1]:
            raise UserError(
                "conversation: the turn has no tokens; give at least one, such as the user's next message",
                field="ids",
                code="range",
            )
        return ids

    @override
    def answer(self, model: PreTrainedModel, request: GenerateRequest) -> Decoded:
        """Answer the last turn; `say` calls it by way of transformers."""
        _require_single(request.input_ids)
        _require_unpadded(request.mask)
        if request.past is not None:
            raise UserError(
                "conversation: it continues from its own cache; leave out past_key_values",
                field="past_key_values",
                code="conflict",
            )
        identity = Identity(adapters=adapters_digest(model))
        self._identity.require(identity, "conversation: the last turn was answered")

        state = self._read(request.input_ids, request.chunk)
        eviction = self.method.periodic_eviction(model)
        # Where the model drops its cache, the state after the answer does not hold the entries of before.
        drops_entries = eviction is not None or length_limit(model.config) is not None
        before_answer = Checkpoint(state, copies=drops_entries)
        decoded = decode(
            self.method.reader(model),
            state,
            eviction=eviction,
            restart=functools.partial(self.method.restart, model),
            **request.decoding,
        )

        self.state = decoded.state
        self.ids = decoded.ids
        self._unread = decoded.ids[:, -1:]
        self._identity = identity
        self._before_answer = before_answer
        return decoded

    def _read(self, prompt: Tensor, chunk: int | None) -> State:
        """The state to answer from, within the budget."""
        if self.state is None:
            self.method.check(prompt.shape[1], context_of(self.model))
            return self.method.start(self.model, prompt, chunk=chunk)
        read = self.ids.shape[1] - self._unread.shape[1]
        if prompt[0, 0] != self.ids[0, 0]:
            raise UserError(
                "conversation: the chat begins with another token than what was read; start a new one",
                field="ids",
                code="conflict",
            )
        common = min(_common(prompt, self.ids), prompt.shape[1] - 1, read)
        state = self.state
        if common < read:
            try:
                state, common = self._cropped(state, read, common)
            except UserError as error:
                raise error.reworded(
                    f"conversation: the chat differs from token {common} on from what was read; start a new "
                    f"Conversation with the whole chat ({error})"
                ) from None
        return self.method.resume(self.model, state, prompt[:, common:], chunk=chunk)

    def _cropped(self, state: State, read: int, common: int) -> tuple[State, int]:
        """The state after at most the first `common` of the `read` tokens, and how many of them it has read."""
        if self._before_answer is not None:
            read -= state.tokens.shape[1] - self._before_answer.length
            state = self._before_answer.restored(state)
        if common >= read:
            return state, read
        if length_limit(self.model.config) is not None:
            raise UserError("this model's RoPE depends on the length of the text", field="model", code="model")
        if state.images or not torch.equal(state.tokens, self.ids[:, :read]):
            raise UserError("the prompt held images, or its method has shortened it", field="prompt", code="state")
        croppable = min((layer.croppable for layer in state.layers), default=0)
        # Some common tokens are read again, so that enough tokens observe.
        reread = max(min(state.needs.window, croppable - (read - common), common - 1), 0)
        return state.without_last(read - common + reread), common - reread


def _common(first: Tensor, second: Tensor) -> int:
    """How many tokens two sequences [1, n] begin with in common."""
    width = min(first.shape[1], second.shape[1])
    differs = (first[0, :width] != second[0, :width]).nonzero()
    return int(differs[0]) if len(differs) else width


def _require_unpadded(mask: Tensor | None) -> None:
    if mask is not None and not bool(mask.bool().all()):
        raise UserError(
            "conversation: the attention_mask hides tokens; give the turn without padding",
            field="attention_mask",
            code="data",
        )


def _require_single(ids: Tensor) -> None:
    if ids.dim() != 2 or len(ids) != 1:
        raise UserError(
            f"conversation: ids of shape {list(ids.shape)} are not one sequence [1, n]; "
            "use one conversation per row, and give neither beams nor num_return_sequences",
            field="ids",
            code="type",
        )
