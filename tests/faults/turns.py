"""Conversations whose chats are rendered again with other tokens, against copies of the states from before answers."""

from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.runtime.conversation import Conversation
from keepsight.runtime.generate import decode, generate, stop_after
from keepsight.runtime.state import State
from tests.faults.pasts import GREEDY, Cases, method_of
from tests.faults.texts import Verdict, judged
from tests.faults.world import World
from tests.tiny import prompt_ids, tiny_model, tiny_tokenizer

_TEMPLATES = (
    str(tiny_tokenizer().chat_template),
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'].split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'].split('</think>')[-1] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}",
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
)
_TEXTS = ("for", " class", "é", "\n\n", "with a", " statement ", "1.5", "it's", "🙂")


def turns(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """Two to five turns: added, or rendered again with other tokens anywhere; and chats as text by templates."""
    cases = Cases(world)
    text_model = tiny_model(vocab_size=512, max_position_embeddings=1024)
    for _ in range(count):
        seed = rng.random()
        case = cases.draw(rng)
        if rng.random() < 0.2:
            yield judged(("text", seed), partial(_as_text, text_model, Random(seed)))
        else:
            yield judged((case, seed), partial(_as_ids, cases, case, Random(seed)))


class _Reference:
    """A conversation that keeps a copy of the state from before each answer, and crops nothing within one."""

    def __init__(self, model: Any, method: Any) -> None:
        self.model = model
        self.method = method
        self.ids = torch.empty(1, 0, dtype=torch.long)
        self.before: State | None = None  # before the last answer
        self.after: State | None = None
        self.asked = 0  # tokens of the chat before the last answer

    def answer(self, chat: Tensor, common: int) -> Tensor:
        """Answer a chat that has its first `common` tokens in common with the last one."""
        if self.before is None or self.after is None:
            state = self.method.start(self.model, chat)
        elif common >= self.ids.shape[1] - 1:
            state = self.method.resume(self.model, self.after, chat[:, self.ids.shape[1] - 1 :])
        elif common >= self.asked:
            state = self.method.resume(self.model, self.before.copy(), chat[:, self.asked :])
        else:
            dropped = self.asked - common
            croppable = min(layer.croppable for layer in self.before.layers) - dropped
            window = max(
                min(self.before.needs.window, croppable, common - 1), 0
            )  # read once more, so that they observe
            state = self.method.resume(
                self.model, self.before.without_last(dropped + window), chat[:, common - window :]
            )
        self.before = state.copy()
        self.asked = chat.shape[1]
        reader = self.method.reader(self.model)
        eviction = self.method.periodic_eviction(self.model)
        decoded = decode(reader, state, stop_after(4, None), pad_token=0, eviction=eviction)
        self.after = decoded.state
        self.ids = torch.cat([chat, decoded.ids], dim=1)
        return decoded.ids


def _as_ids(cases: Cases, case: tuple[str, str, int | None], rng: Random) -> str:
    model_name, method_name, budget = case
    model = cases.models[model_name]
    method = cases.method(method_name, budget)
    conversation = Conversation(model, method)
    reference = _Reference(model, method)
    word = "right"
    for number in range(rng.randint(2, 5)):
        before = conversation.ids
        length = before.shape[1]
        chat = _next_chat(before, number, rng)
        common = _common_tokens(chat, before)
        try:
            if common == length and rng.random() < 0.5:
                answer = conversation.say(chat[:, length:], **GREEDY)
            else:
                answer = conversation.say_rendered(chat, **GREEDY)
        except UserError as error:
            assert common < length - 1, f"a chat that goes on was refused: {error}"
            assert len(str(error).splitlines()) == 1, f"not one line: {error}"
            assert conversation.ids is before, f"changed: {error}"
            can_keep = conversation.state is not None and conversation.state.has_plain_entries
            assert common < reference.asked or not can_keep, f"an answer stays: {error}"
            word = "one line"
            continue
        expected = reference.answer(chat, common)
        assert torch.equal(answer, expected), f"turn {number} from {common}: {answer.tolist()}, {expected.tolist()}"
        if method.is_full_cache:
            assert torch.equal(answer, generate(model, chat, **GREEDY)), "not what the full cache answers"
    return word


def _next_chat(ids: Tensor, number: int, rng: Random) -> Tensor:
    """The conversation so far, often with other tokens near its end, and a further turn."""
    turn_length = rng.choice((45, 60)) if number == 0 else rng.randint(1, 12)
    turn, _ = prompt_ids(turn_length, seed=rng.randrange(99))
    length = ids.shape[1]
    if number and rng.random() < 0.7:
        common = length - rng.choice((1, rng.randint(1, 4), rng.randint(1, 12), rng.randint(1, length)))
        others = 3 + (ids[:, common:] + rng.randint(1, 60)) % 90
        others = others[:, : rng.randint(0, length - common)]
        return torch.cat([ids[:, :common], others, turn], dim=1)
    return torch.cat([ids, turn], dim=1)


def _common_tokens(chat: Tensor, ids: Tensor) -> int:
    """Number of tokens that two chats [1, N] begin with alike."""
    width = min(ids.shape[1], chat.shape[1])
    differing = (chat[0, :width] != ids[0, :width]).nonzero()
    return int(differing[0]) if len(differing) else width


def _as_text(model: Any, rng: Random) -> str:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = rng.choice(_TEMPLATES)
    conversation = Conversation(model, method_of("full", None))
    chat: list[dict[str, str]] = []
    for _ in range(rng.randint(2, 4)):
        chat.append({"role": "user", "content": "".join(rng.choice(_TEXTS) for _ in range(rng.randint(1, 9)))})
        text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        options: dict[str, Any] = {"max_new_tokens": rng.randint(2, 14), "do_sample": True, "tokenizer": tokenizer}
        seed = rng.randrange(1 << 30)
        torch.manual_seed(seed)
        answer = conversation.say_rendered(text, **options)
        torch.manual_seed(seed)
        assert torch.equal(answer, generate(model, ids, **options)), "not what the full cache answers"
        assert torch.equal(conversation.ids, torch.cat([ids, answer], dim=1)), "read other tokens"
        thought = "so</think>" * rng.randint(0, 1)
        answer_text = str(tokenizer.decode(answer[0], skip_special_tokens=True))
        chat.append({"role": "assistant", "content": thought + answer_text})
    return "right"
