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
    cases, writer = Cases(world), tiny_model(vocab_size=512, max_position_embeddings=1024)
    for _ in range(count):
        seed, case = rng.random(), cases.draw(rng)
        if rng.random() < 0.2:
            yield judged(("text", seed), partial(_as_text, writer, Random(seed)))
        else:
            yield judged((case, seed), partial(_as_ids, cases, case, Random(seed)))


class _Reference:
    """A conversation that keeps a copy of the state from before each answer, and crops nothing within one."""

    def __init__(self, model: Any, method: Any) -> None:
        self.model, self.method = model, method
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
            taken = self.asked - common
            spare = min(layer.croppable for layer in self.before.layers) - taken
            again = max(min(self.before.needs.window, spare, common - 1), 0)  # read once more, so that they observe
            first = common - again
            state = self.method.resume(self.model, self.before.without_last(taken + again), chat[:, first:])
        self.before, self.asked = state.copy(), chat.shape[1]
        reader, eviction = self.method.reader(self.model), self.method.periodic_eviction(self.model)
        decoded = decode(reader, state, stop_after(4, None), pad_token=0, eviction=eviction)
        self.after, self.ids = decoded.state, torch.cat([chat, decoded.ids], dim=1)
        return decoded.ids


def _as_ids(cases: Cases, case: tuple[str, str, int | None], rng: Random) -> str:
    model, method = cases.models[case[0]], cases.method(*case[1:])
    talk, reference, word = Conversation(model, method), _Reference(model, method), "right"
    for number in range(rng.randint(2, 5)):
        turn = prompt_ids(rng.choice((45, 60)) if number == 0 else rng.randint(1, 12), seed=rng.randrange(99))[0]
        chat = torch.cat([talk.ids, turn], dim=1)
        said = talk.ids.shape[1]
        if number and rng.random() < 0.7:
            common = said - rng.choice((1, rng.randint(1, 4), rng.randint(1, 12), rng.randint(1, said)))
            chat[:, common:said] = 3 + (chat[:, common:said] + rng.randint(1, 60)) % 90
            chat = torch.cat([chat[:, : common + rng.randint(0, said - common)], turn], dim=1)
        width = min(said, chat.shape[1])
        differs = (chat[0, :width] != talk.ids[0, :width]).nonzero()
        common = int(differs[0]) if len(differs) else width
        before = talk.ids
        try:
            if common == said and rng.random() < 0.5:
                answer = talk.say(chat[:, said:], **GREEDY)
            else:
                answer = talk.say_rendered(chat, **GREEDY)
        except UserError as error:
            assert common < said - 1, f"a chat that goes on was refused: {error}"
            assert len(str(error).splitlines()) == 1 and talk.ids is before, f"not one line, or changed: {error}"
            can_keep = talk.state is not None and talk.state.has_plain_entries
            assert common < reference.asked or not can_keep, f"an answer stays: {error}"
            word = "one line"
            continue
        expected = reference.answer(chat, common)
        assert torch.equal(answer, expected), f"turn {number} from {common}: {answer.tolist()}, {expected.tolist()}"
        if method.is_full_cache:
            assert torch.equal(answer, generate(model, chat, **GREEDY)), "not what the full cache answers"
    return word


def _as_text(model: Any, rng: Random) -> str:
    tokenizer, method = tiny_tokenizer(), method_of("full", None)
    tokenizer.chat_template = rng.choice(_TEMPLATES)
    talk, chat = Conversation(model, method), list[dict[str, str]]()
    for _ in range(rng.randint(2, 4)):
        chat.append({"role": "user", "content": "".join(rng.choice(_TEXTS) for _ in range(rng.randint(1, 9)))})
        text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        options: dict[str, Any] = {"max_new_tokens": rng.randint(2, 14), "do_sample": True, "tokenizer": tokenizer}
        seed = rng.randrange(1 << 30)
        torch.manual_seed(seed)
        answer = talk.say_rendered(text, **options)
        torch.manual_seed(seed)
        assert torch.equal(answer, generate(model, ids, **options)), "not what the full cache answers"
        assert torch.equal(talk.ids, torch.cat([ids, answer], dim=1)), "read other tokens"
        thought = "so</think>" * rng.randint(0, 1)
        answer_text = str(tokenizer.decode(answer[0], skip_special_tokens=True))
        chat.append({"role": "assistant", "content": thought + answer_text})
    return "right"
