"""Sessions: the states of answered prompts, so that the next turn of a chat reads only its new tokens.

A session is the state of a prompt as its answers were decoded from, and the entries that these answers have added to
it. A later prompt that begins with the same tokens continues after the last common token, or a few tokens earlier, so
that as many tokens observe as in the whole text. If a recording cannot be rolled back, such as attention summed over
all tokens, it continues from the end of the session's prompt.

After an eviction a state cannot be rolled back before the end of its prompt, and new tokens see only the entries that
were kept (`later_turns=continue`). With `later_turns=reread` such a session answers only the same prompt again, and
longer prompts are read as a whole: each answer then depends on its own request alone.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.runtime.generate import Method
from keepsight.runtime.rope_length import length_limit
from keepsight.runtime.state import Needs, State, has_bounded

_LEAST = 16
"""Fewest tokens that are worth a session: continuing from one has a small cost."""
_MOST = 4096
"""Limit of sessions, since every prompt is compared with each of them."""
_TENSORS = "keys", "values", "real", "_room", "_real_room", "recorded", "recent"
"""Attributes of cache layers that hold tensors."""


@dataclass
class _Answer:
    """Tokens of an answer that were read, [T] int64, and each layer's keys and values of them, [1, K, T, d]."""

    ids: Tensor
    entries: list[tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Session:
    """The state of a prompt, and what its answers have added to it.

    Attributes:
        tenant: Whose it is; it serves nobody else.
        method: The method that read it.
        ids: [N] int64 on the CPU, the prompt.
        state: Its state as answers were decoded from it; it stays unchanged.
        is_continued: Whether it goes on from a state of which entries were evicted.
        nbytes: Bytes of all of its tensors.
        answers: Answers to it.
        is_whole: Whether nothing was evicted.
        is_croppable: Whether it can be taken back to any of its tokens.
    """

    tenant: str
    method: Method
    ids: Tensor
    state: State
    is_continued: bool
    nbytes: int = field(init=False)
    answers: list[_Answer] = field(default_factory=list)
    is_whole: bool = field(init=False)
    is_croppable: bool = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = _storage_bytes([self.ids, *_tensors_of(self.state)])
        self.is_whole = self.state.is_whole
        self.is_croppable = self.is_whole and self._records_window_alone and not has_bounded(self.state.cache)

    @property
    def takes_answers(self) -> bool:
        """Whether the entries of answers can be added to its state again."""
        if has_bounded(self.state.cache):
            return False
        return all(not layer.indexed and layer.recurrent is None for layer in self.state.layers)

    @property
    def _records_window_alone(self) -> bool:
        needs = self.state.needs
        return needs == Needs(window=needs.window)

    @property
    def _keeps_window(self) -> bool:
        """Whether its state has as many observing queries as a longer prompt asks for."""
        return self.state.needs.window <= getattr(self.method, "window", 0)

    def match(self, ids: Tensor, evicted: bool) -> tuple[int, _Answer | None]:
        """How many tokens of a prompt [n] int64 it has read, 0 for none, and the answer that they reach into.

        `evicted` says whether longer prompts may go on from what eviction has left of this one.
        """
        prompt = len(self.ids)
        common = _common(ids, self.ids)
        if common == prompt == len(ids):
            return (prompt if evicted or not self.is_continued else 0), None

        answer = None
        if common == prompt and self.answers:
            answer = max(self.answers, key=lambda answer: _common(ids[prompt:], answer.ids))
            common += _common(ids[prompt:], answer.ids)
        before_observers = len(ids) - max(self.state.needs.window, 1)
        count = min(common, before_observers)
        if self.is_croppable:
            return max(count, 0), answer
        if common < prompt or not (evicted or (self.is_whole and self._keeps_window)):
            return 0, None
        if count <= prompt or not self._records_window_alone:
            return prompt, None  # where what observes is recorded
        return count, answer

    def state_after(self, count: int, answer: _Answer | None) -> State:
        """A state after `count` tokens, as `match` returns them, to read more into."""
        more = count - len(self.ids)
        if more == 0:
            return self.state.copy()
        needs = self.state.needs
        if more < 0:
            return self.state.without_last(-more).unrecorded(needs)

        assert answer is not None
        state = self.state.unrecorded(needs)
        for layer, (keys, values) in zip(state.layers, answer.entries, strict=True):
            layer.update(keys[:, :, :more], values[:, :, :more])
        return replace(
            state,
            tokens=torch.cat([state.tokens, answer.ids[None, :more].to(state.tokens.device)], dim=1),
            lengths=state.lengths + more,
        )


@dataclass
class Continuation:
    """From where a prompt is read on.

    Attributes:
        session: The session.
        count: Tokens of the prompt that are not read again.
        state: The state after these.
    """

    session: Session
    count: int
    state: State


class Sessions:
    """The sessions of a server, the least recently used ones dropped where they take more than `max_bytes`.

    One thread uses it; its numbers may be read by others.

    Args:
        model: The model that reads the prompts.
        max_bytes: Bytes of all sessions; 0 for none.
        evicted: Whether later turns go on from evicted states (`later_turns=continue`).
    """

    def __init__(self, model: PreTrainedModel, max_bytes: int, evicted: bool) -> None:
        # The angles of RoPE that depends on the length of a text are those of no longer one.
        self.max_bytes = 0 if length_limit(model.config) is not None else max_bytes
        self.evicted = evicted
        self.nbytes = 0
        self._sessions: list[Session] = []  # the latest used last

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, tenant: str, method: Method, ids: Tensor) -> Continuation | None:
        """From where a tenant's prompt [n] int64 can be read on; None where no session begins as it does."""
        best: tuple[int, Session, _Answer | None] | None = None
        for session in self._sessions:
            if session.tenant != tenant or session.method != method:
                continue
            count, answer = session.match(ids, self.evicted)
            if count >= _LEAST and (best is None or count >= best[0]):
                best = (count, session, answer)
        if best is None:
            return None
        count, session, answer = best
        self._sessions.remove(session)
        self._sessions.append(session)
        return Continuation(session, count, session.state_after(count, answer))

    def add(self, tenant: str, method: Method, state: State, ids: Tensor, after: Continuation | None) -> Session | None:
        """Keep the state of a prompt [n] int64, which was read on from another; returns None where none is kept."""
        if not self.max_bytes or not state.has_plain_entries or state.images:
            return None
        if not torch.equal(state.tokens[0].cpu(), ids.cpu()):
            return None  # such as a prompt that its method has shortened
        if after is not None and after.count == len(ids):
            return after.session
        is_continued = after is not None and (after.session.is_continued or not after.session.is_whole)
        session = Session(tenant, method, ids.cpu(), state, is_continued)
        if session.nbytes > self.max_bytes:
            return None
        self._sessions.append(session)
        self.nbytes += session.nbytes
        self._drop_oldest()
        return session

    def wants_answer(self, session: Session) -> bool:
        """Whether later turns can use the entries of an answer to a session."""
        return session in self._sessions and (self.evicted or session.is_whole) and session.takes_answers

    def add_answer(self, session: Session, ids: Tensor, entries: list[tuple[Tensor, Tensor]]) -> None:
        """Keep the tokens of an answer that were read, [T] int64 on the CPU, and each layer's keys and values of them.

        The session is one that `wants_answer`.
        """
        if any(torch.equal(answer.ids, ids) for answer in session.answers):
            return
        session.answers.append(_Answer(ids, entries))
        added = _storage_bytes([ids, *itertools.chain.from_iterable(entries)])
        session.nbytes += added
        self.nbytes += added
        self._sessions.remove(session)
        self._sessions.append(session)
        self._drop_oldest()

    def clear(self) -> None:
        """Drop all of them."""
        self._sessions = []
        self.nbytes = 0

    def _drop_oldest(self) -> None:
        while self.nbytes > self.max_bytes or len(self._sessions) > _MOST:
            self.nbytes -= self._sessions.pop(0).nbytes


def _common(first: Tensor, second: Tensor) -> int:
    """How many tokens two sequences [n] begin with in common."""
    width = min(len(first), len(second))
    differs = (first[:width] != second[:width]).nonzero()
    return int(differs[0]) if len(differs) else width


def _tensors_of(state: State) -> Iterator[Tensor]:
    yield from (state.logits, state.tokens, *state.features)
    layers: list[Any] = state.cache.layers
    for layer in layers:
        for name in _TENSORS:
            yield from _tensors_in(getattr(layer, name, None))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in recordings, which are dataclasses, and in containers of these."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors_in(item)
    elif is_dataclass(value):
        for part in fields(value):
            yield from _tensors_in(getattr(value, part.name))


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory of tensors, which views of one memory share."""
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
