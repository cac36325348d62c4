"""Answers of all kinds and stops of every form: in the text, in the server and in lm-evaluation-harness alike."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any

import httpx
import torch

from keepsight.models.answer_text import AnswerText
from keepsight.models.targets import Target
from keepsight.runtime.methods import SnapKV
from keepsight.serving.engine import Engine
from keepsight.serving.server import Service
from tests.faults.texts import Verdict, accepted, judged
from tests.faults.world import World
from tests.tiny import tiny_model
from tests.tokenizers import ScriptedHead, scripted, tokenizers_of_all_kinds

_TEXTS = (
    "Hi",
    "x",
    ".",
    " ",
    "\n",
    "\n\n",
    "a b",
    "def",
    "\ndef",
    "stop",
    "aab",
    "\u00e9",
    "\u65e5",
    "\U0001f642",
    "|",
    "user",
)
_MARKS = "".join(map(chr, range(0xE000, 0xE010)))
"""Stand for special tokens in the oracle's texts."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
Piece = tuple[str, list[int]]
"""A piece of an answer: its text, a mark for a special token, or a replacement character; and its tokens."""


class _Speaker:
    """A tokenizer, with a server and a harness model whose answers a test writes."""

    def __init__(self, tokenizer: Any) -> None:
        from keepsight.eval.harness import HarnessModel

        self.tokenizer = tokenizer
        self.special: dict[str, str] = {}
        for mark, name in zip(_MARKS, tokenizer.all_special_tokens, strict=False):
            if name not in (tokenizer.eos_token, tokenizer.unk_token):
                self.special[mark] = name
        torch.manual_seed(0)
        self.model = tiny_model(vocab_size=len(tokenizer) + 8, max_position_embeddings=4096, pad_token_id=0)
        self.model.generation_config.eos_token_id = int(tokenizer.eos_token_id)
        self.head: ScriptedHead = scripted(self.model)
        self.target = Target(self.model, tokenizer, "tiny", "1")
        self.engine = Engine(self.model, SnapKV(40, window=8), rows=2)
        self.app = Service(self.engine, self.target, name="tiny", key=None, answer_tokens=500, max_bytes=2**16).app()
        self.harness: Any = HarnessModel.__new__(HarnessModel)
        super(HarnessModel, self.harness).__init__()
        self.harness.target = self.target
        self.harness.model = self.model
        self.harness.tokenizer = tokenizer
        self.harness.method = SnapKV(40, window=8)
        self.harness.max_length = 4096
        self.harness._device = self.model.device

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def stops(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """An answer of words, special tokens and broken bytes, with stops that are in it or nearly."""
    speakers = {kind: _Speaker(tokenizer) for kind, tokenizer in tokenizers_of_all_kinds().items()}
    ways = (_directly, _directly, _by_server, _by_stream, _by_harness)
    with ExitStack() as running:
        for speaker in speakers.values():
            running.enter_context(speaker.engine)
        for _ in range(count):
            kind = rng.choice([*speakers])
            way = rng.choice(ways)
            seed = rng.random()
            yield judged((way.__name__, kind, seed), partial(_trial, speakers[kind], way, Random(seed)))


def _trial(speaker: _Speaker, way: Any, rng: Random) -> str:
    pieces = _pieces(speaker, rng)
    marked = "".join(text for text, _ in pieces)
    tokens = [token for _, ids in pieces for token in ids]
    marked_stops = _stops(marked, rng)
    stop_texts = ["".join(speaker.special.get(letter, letter) for letter in stop) for stop in marked_stops]
    text = accepted(lambda: way(speaker, tokens, stop_texts, rng))
    possible = _possible(marked, marked_stops)
    assert text in possible, f"{text!a}, not one of {possible!a}, of {marked!a} with {marked_stops!a}, tokens {tokens}"
    return "right"


def _pieces(speaker: _Speaker, rng: Random) -> list[Piece]:
    """Up to 12 pieces, which the tokenizer reads apart as it would together."""
    pieces = list[Piece]()
    bytes_alone = speaker.tokenizer.get_vocab().get("<0xF0>")
    for _ in range(rng.randint(1, 12)):
        drawn = rng.random()
        if drawn < 0.2 and speaker.special:
            mark = rng.choice([*speaker.special])
            pieces.append((mark, [speaker.tokenizer.convert_tokens_to_ids(speaker.special[mark])]))
        elif drawn < 0.3 and bytes_alone is not None:
            pieces.append((_REPLACEMENT, [bytes_alone]))
        else:
            text = rng.choice(_TEXTS)
            ids = speaker.ids(text)
            shown = AnswerText(speaker.tokenizer)  # some begin a text with a space, which a text's start hides
            for token in [*speaker.ids("x"), *ids]:
                shown.add(token)
            shown.finish()
            pieces.append((shown.text[1:], ids))
    for index, (text, ids) in enumerate(pieces):
        if text not in speaker.special:
            is_hidden = bytes_alone is not None and text.startswith(" ")
            pieces[index] = (text.removeprefix(" ") if is_hidden else text, ids)
            break
    return pieces


def _stops(marked: str, rng: Random) -> list[str]:
    """Up to three stops: parts of the answer, or others."""
    drawn = list[str]()
    for _ in range(rng.randint(0, 3)):
        start = rng.randrange(len(marked)) if marked else 0
        part = marked[start : start + rng.randint(1, 5)]
        drawn.append(part if part and rng.random() < 0.7 else rng.choice(_TEXTS))
    return drawn


def _possible(marked: str, wanted: list[str]) -> list[str]:
    """The texts that an answer may have: it ends before one of the stops that begin before the first one ends."""
    plain = "".join(letter for letter in marked if letter not in _MARKS)
    places = list[tuple[int, int]]()
    for stop in wanted:
        if any(letter in _MARKS for letter in stop):
            starts = [start for start in range(len(marked)) if marked.startswith(stop, start)]
            ends = [start + len(stop) for start in starts]
            hidden = [sum(letter in _MARKS for letter in marked[:place]) for place in range(len(marked) + 1)]
            places += [(start - hidden[start], end - hidden[end]) for start, end in zip(starts, ends, strict=True)]
        else:
            places += [(start, start + len(stop)) for start in range(len(plain)) if plain.startswith(stop, start)]
    if not places:
        return [plain]
    first = min(end for _, end in places)
    return [plain[:start] for start, _ in places if start <= first]


def _directly(speaker: _Speaker, tokens: list[int], wanted: list[str], rng: Random) -> str:
    answer = AnswerText(speaker.tokenizer, wanted)
    sent = ""
    for token in tokens:
        ended = answer.add(token)
        assert answer.text.startswith(sent), f"sent {sent!a}, of {answer.text!a}"
        sent = answer.text[: answer.settled]
        if ended:
            break
    answer.finish()
    assert answer.text.startswith(sent), f"sent {sent!a}, of {answer.text!a}"
    return answer.text


def _by_server(speaker: _Speaker, tokens: list[int], wanted: list[str], rng: Random) -> str:
    return str(_asked(speaker, tokens, wanted, False).json()["choices"][0]["text"])


def _by_stream(speaker: _Speaker, tokens: list[int], wanted: list[str], rng: Random) -> str:
    text = ""
    for line in _asked(speaker, tokens, wanted, True).text.splitlines():
        if line.startswith("data: {"):
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


def _asked(speaker: _Speaker, tokens: list[int], wanted: list[str], stream: bool) -> httpx.Response:
    speaker.head.say([*tokens, speaker.tokenizer.eos_token_id])
    stop = wanted[0] if len(wanted) == 1 else wanted
    body = {"model": "tiny", "prompt": "Q\n", "max_tokens": 200, "stop": stop, "stream": stream}

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(speaker.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return await client.post("/v1/completions", json=body)

    reply = asyncio.run(ask())
    assert reply.status_code == 200, reply.text
    return reply


def _by_harness(speaker: _Speaker, tokens: list[int], wanted: list[str], rng: Random) -> str:
    from lm_eval.api.instance import Instance

    speaker.head.say([*tokens, speaker.tokenizer.eos_token_id])
    until: Any = wanted[0] if len(wanted) == 1 else wanted
    request: Any = Instance("generate_until", {}, ("Q\n", {"until": until, "max_gen_toks": 200}), 0)
    (text,) = speaker.harness.generate_until([request], disable_tqdm=True)
    return str(text)
