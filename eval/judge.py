"""A language model as judge of answers that no metric can score: MT-Bench's and LongBench-Write's protocols.

MT-Bench (arXiv:2306.05685; lm-sys/FastChat, `llm_judge`): `single` rates an answer from 1 to 10, here divided by 10;
`pairwise` compares it with the full cache's in both orders: 1 where both games are won, 0 where both are lost, else
1/2, so that the mean is FastChat's adjusted win rate. LongBench-Write (arXiv:2408.07055; THUDM/LongWriter): six marks
from 1 to 5, whose mean is shown as 0 to 1. HELMET (arXiv:2410.02694, section 2.2): an answer's fluency, 0 or 1, times
its correctness of 0 to 3; a summary's fluency times the F1 of the key points that it holds and of its sentences that
the reference supports. The rubrics are its paper's, in our words.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from keepsight.endpoint import Endpoint, EndpointError, check_url, refuse_filtered
from keepsight.errors import BadRow, UserError
from keepsight.eval.tasks.benchmark import fill_in
from keepsight.eval.tasks.samples import HELMET_JUDGED, Sample
from keepsight.files import from_json, own_yaml

MODES = ("single", "pairwise")
LONGBENCH_WRITE = "longbench-write"
"""The metric of samples that are judged with LongBench-Write's prompt; all others are judged as in MT-Bench."""
_MARKS = ("Relevance", "Accuracy", "Coherence", "Clarity", "Breadth and Depth", "Reading Experience")
_TRIES = 5
_TOKENS = 2048


@dataclass
class Judge:
    """An OpenAI-compatible endpoint; its fields are the command's keys `judge.KEY`.

    Attributes:
        url: Base URL of the judge's API, such as http://localhost:8000/v1; chat/completions is appended.
        model: Name of the judge model in the API.
        mode: single rates each answer; pairwise compares it with the full cache's answer.
        parallel: Number of concurrent requests.
        key: Environment variable with the API key; without it no key is sent.
        options: Parameters of each request, such as {reasoning_effort: low}. They override the defaults; null removes a
            parameter: {temperature: null}.
    """

    url: str | None = None
    model: str = "gpt-4"
    mode: str = "single"
    parallel: int = 8
    key: str = "OPENAI_API_KEY"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The judge's model and settings, on which scores depend; empty where there is no judge."""
        options = f" {json.dumps(self.options, sort_keys=True, default=str)}" if self.options else ""
        return f"{self.model} {self.mode}{options}" if self.url else ""

    def check(self) -> None:
        """UserError if a value is out of range or not a URL."""
        if self.mode not in MODES:
            raise UserError(f"judge.mode={self.mode} is unknown; choose one of {', '.join(MODES)}")
        if self.parallel < 1:
            raise UserError(f"judge.parallel={self.parallel} must be at least 1")
        if self.url:
            check_url("judge.url", self.url)

    def score(self, sample: Sample, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The rows of a sample, the full cache's first, with their scores and the judge's words as `judgments`.

        BadRow: there is no verdict on one of the answers, or a content filter refuses it. UserError: no answer at all.
        """
        if not sample.judge:
            return [dict(row) for row in rows]
        full, *_ = talks = [_talk(row) for row in rows]
        asked = dict.fromkeys(talk for talk, row in zip(talks, rows, strict=True) if math.isnan(row["score"]))
        pairwise = self.mode == "pairwise" and sample.metric not in HELMET_JUDGED
        judging = self._compare if pairwise else self._mark if sample.metric in HELMET_JUDGED else self._rate
        with ThreadPoolExecutor(self.parallel) as pool:
            found = dict(zip(asked, pool.map(lambda talk: judging(sample, talk, full), asked), strict=True))
        return [dict(row) | found.get(talk, {}) for talk, row in zip(talks, rows, strict=True)]

    def _rate(self, sample: Sample, talk: tuple[str, ...], _: tuple[str, ...]) -> dict[str, Any]:
        writing = sample.metric == LONGBENCH_WRITE
        name, read = (LONGBENCH_WRITE, _mean_mark) if writing else (_prompt_name("single", sample), _rating)
        value, words = self._ask(name, sample, talk, talk, read)
        return {"score": value, "judgments": [words]}

    def _mark(self, sample: Sample, talk: tuple[str, ...], _: tuple[str, ...]) -> dict[str, Any]:
        """HELMET's score of an answer or a summary."""
        if sample.metric == "helmet-answer":
            value, words = self._ask(sample.metric, sample, talk, talk, lambda said: _share(said, "correctness", 3))
            return {"score": value, "judgments": [words]}
        points = len(sample.references) - 1
        readers: dict[str, Any] = {
            "fluency": lambda said: _share(said, None, 1),
            "recall": lambda said: _share(said, "recall", points),
            "precision": lambda said: _share(said, "precision", None),
        }
        found = {name: self._ask(f"helmet-{name}", sample, talk, talk, read) for name, read in readers.items()}
        fluency, recall, precision = (value for value, _ in found.values())
        both = recall + precision
        score = fluency * (2 * recall * precision / both if both else 0.0)
        return {"score": score, "judgments": [words for _, words in found.values()]}

    def _compare(self, sample: Sample, talk: tuple[str, ...], full: tuple[str, ...]) -> dict[str, Any]:
        if talk == full:
            return {"score": 0.5, "judgments": []}  # both orders ask the judge the same: its verdicts cancel out
        name = _prompt_name("pair", sample)
        first, words = self._ask(name, sample, talk, full, _winner)
        second, more = self._ask(name, sample, full, talk, _winner)
        return {"score": 0.5 + first / 2 if first == -second else 0.5, "judgments": [words, more]}

    def _ask(self, name: str, sample: Sample, a: tuple[str, ...], b: tuple[str, ...], read: Any) -> tuple[float, str]:
        """What `read` finds in the judge's reply, and the reply; asks again if it finds nothing."""
        prompt = _prompts()[name]
        asked = (*sample.earlier, sample.prompt)
        texts = {"question": asked, "ref_answer": sample.references, "answer_a": a, "answer_b": b}
        fields = {f"{kind}_{turn}": text for kind, each in texts.items() for turn, text in enumerate(each, start=1)}
        fields |= {"asked": sample.question.strip(), "answers": "; ".join(sample.references)}
        fields["points"] = "\n".join(f"{number}. {text}" for number, text in enumerate(sample.references[1:], start=1))
        messages = [{"role": "user", "content": fill_in(prompt["user"], fields)}]
        if prompt["system"]:
            messages.insert(0, {"role": "system", "content": prompt["system"]})
        words = ""
        for attempt in range(_TRIES):
            temperature = 0.5 if attempt or name == LONGBENCH_WRITE else 0.0
            words = self._complete(
                {"messages": messages, "temperature": temperature, "max_tokens": _TOKENS}, f"{sample.task}/{sample.id}"
            )
            if (value := read(words)) is not None:
                return value, words
        raise BadRow(
            f"judge.model={self.model}: no verdict on {sample.task}/{sample.id} in {_TRIES} tries, the last said "
            f"{words[-80:]!r}; choose another judge, or let it write more: judge.options={{max_tokens: 8192}}"
        )

    def _complete(self, body: Mapping[str, Any], subject: str) -> str:
        """The judge's words; `subject` names what is judged in messages."""
        body = self._with_options({"model": self.model, **body})
        while True:
            try:
                return self._endpoint.post("chat/completions", body, _words)
            except EndpointError as error:
                if error.is_filter or (error.status and _TOO_LONG.search(error.body)):
                    raise BadRow(f"judge.url={self.url}: no judgment of {subject} ({error})") from None
                changed = self._without_refused(body, error.body) if error.status in (400, 422) else body
                if changed == body:
                    raise UserError(f"judge.url={self.url}: no judgment ({error}); run the command again") from None
                body = changed

    @cached_property
    def _endpoint(self) -> Endpoint:
        return Endpoint(str(self.url), self.key, _TRIES)

    def _with_options(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The request with `options`; a limit of tokens among them replaces the usual one under either name."""
        limits = {"max_tokens", "max_completion_tokens"}
        usual = {name: value for name, value in body.items() if name not in limits or not limits & self.options.keys()}
        return {name: value for name, value in {**usual, **self.options}.items() if value is not None}

    def _without_refused(self, body: Mapping[str, Any], reason: str) -> dict[str, Any]:
        """The request without the parameter that a refusal names: reasoning models take other ones."""
        changed = dict(body)
        if "max_tokens" in reason and "max_tokens" in body:
            changed["max_completion_tokens"] = changed.pop("max_tokens")
        elif "temperature" in reason and "temperature" not in self.options:
            changed.pop("temperature", None)
        return changed


_TOO_LONG = re.compile(r"context.?(length|window)|too long", re.IGNORECASE)
"""What refusals of prompts that the judge has no room for say."""


def _words(reply: Any) -> str:
    """The text of a reply, empty where thinking took all tokens; EndpointError if a content filter stopped it."""
    refuse_filtered(choice := reply["choices"][0])
    words = choice["message"]["content"]
    if words is not None and not isinstance(words, str):
        raise TypeError(f"the content of the reply is no text but {words!r:.60}")
    return words or ""


def _talk(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A variant's answers, turn after turn."""
    return tuple(answer.strip() for answer in (*row.get("before", ()), row["answer"]))


def _prompt_name(kind: str, sample: Sample) -> str:
    version = "math-v1" if sample.references else {"single": "v1", "pair": "v2"}[kind]
    return f"{kind}-{version}" + ("-multi-turn" if sample.earlier else "")


@lru_cache(maxsize=1)
def _prompts() -> dict[str, dict[str, str]]:
    return own_yaml("keepsight.eval", "judge")


_QUOTED = (
    re.compile(r"(```|~~~).*?(?:\1|\Z)", re.DOTALL),
    re.compile(r"`[^`\n]*`|\"[^\"\n]*\"|“[^”]*”|«[^»]*»|'\[[^'\n]*\]'|^\s*>.*$", re.MULTILINE),
)


_THINKING = r"(?:\w+:)?(?:think|thinking|thought|reasoning)\s*"
_THOUGHT = re.compile(rf"</{_THINKING}>|\[/think\]|◁/{_THINKING}▷|<\|channel\|>final<\|message\|>", re.IGNORECASE)
_THINKS = re.compile(rf"<{_THINKING}>|\[think\]|◁{_THINKING}▷|<\|channel\|>analysis<\|message\|>", re.IGNORECASE)
"""The ends and beginnings of thinking: as most models mark them, Mistral's, Kimi's, and gpt-oss's channels."""


def _conclusion(words: str) -> str:
    """The judge's words without its thinking, whose beginning may be part of the prompt and whose end may be cut."""
    return _THINKS.split(_THOUGHT.split(words)[-1])[0]


def _verdict(words: str) -> str:
    """The judge's words without its thinking and its quotations."""
    words = _conclusion(words)
    for quoted in _QUOTED:
        words = quoted.sub("", words)
    return words


def _rating(words: str) -> float | None:
    """The last number in double brackets, else in single ones, of 1 to 10; FastChat takes the first one anywhere."""
    verdict = _verdict(words)
    found = re.findall(r"\[\[(\d+\.?\d*)\]\]", verdict) or re.findall(r"\[(\d+\.?\d*)\]", verdict)
    return float(found[-1]) / 10 if found and 1 <= float(found[-1]) <= 10 else None


def _winner(words: str) -> float | None:
    """The last verdict: 1 for assistant A, -1 for B, 0 for a tie."""
    found = re.findall(r"\[\[([ABC])\]\]", _verdict(words))
    return {"A": 1.0, "B": -1.0, "C": 0.0}[found[-1]] if found else None


def _share(words: str, name: str | None, most: int | None) -> float | None:
    """What the last JSON object says: fluency times a count as a share of `most`, or of the sentences it counts."""
    found = re.findall(r"\{[^{}]*\}", _conclusion(words))
    try:
        given = from_json(found[-1].encode(), dict[str, int])
        fluency = given["fluency"] if name in (None, "correctness") else 1
        share = 1.0 if name is None else given[name] / (given["sentences"] if most is None else most)
        return fluency * share if 0 <= share <= 1 and fluency in (0, 1) else None
    except (ValueError, KeyError, TypeError, IndexError, ZeroDivisionError):
        return None


def _mean_mark(words: str) -> float | None:
    """LongWriter's: the mean over the six dimensions, 1 as 0 and 5 as 1."""
    words = _conclusion(words)
    fenced = re.findall(r"```json\n(.*?)\n```", words, re.DOTALL)
    try:
        given = from_json((fenced[-1] if fenced else words).replace("\n", "").encode(), dict[str, Any])
        marks = [(float(str(given[dimension])) - 1) / 4 for dimension in _MARKS]  # True is no mark
    except (ValueError, KeyError, TypeError):
        return None
    return sum(marks) / len(marks) if all(0 <= mark <= 1 for mark in marks) else None  # NaN is neither
