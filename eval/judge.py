"""A language model as judge of answers that no metric can score: MT-Bench's and LongBench-Write's protocols.

MT-Bench (arXiv:2306.05685; lm-sys/FastChat, `llm_judge`): `single` rates an answer from 1 to 10, here divided by 10;
`pairwise` compares it with the full cache's in both orders: 1 where both games are won, 0 where both are lost, else
1/2, so that the mean is FastChat's adjusted win rate. LongBench-Write (arXiv:2408.07055; THUDM/LongWriter): six marks
from 1 to 5, whose mean is shown as 0 to 1. HELMET (arXiv:2410.02694, section 2.2): an answer's fluency, 0 or 1, times
its correctness of 0 to 3; a summary's fluency times the F1 of the key points that it holds and of its sentences that
the reference supports. The rubrics are its paper's, in our words.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from keepsight.endpoint import Endpoint, EndpointError, check_url, refuse_filtered
from keepsight.errors import BadRow, UserError
from keepsight.eval.record import ResultRow
from keepsight.eval.tasks.benchmark import fill_in
from keepsight.eval.tasks.samples import HELMET_JUDGED, Sample
from keepsight.files import from_json, package_yaml

MODES = ("single", "pairwise")
LONGBENCH_WRITE = "longbench-write"
"""The metric of samples that are judged with LongBench-Write's prompt; all others are judged as in MT-Bench."""
_MARKS = ("Relevance", "Accuracy", "Coherence", "Clarity", "Breadth and Depth", "Reading Experience")
_TRIES = 5
_TOKENS = 2048

Talk = tuple[str, ...]
"""A variant's answers, turn after turn."""
Reader = Callable[[str], float | None]
"""Finds the verdict in the judge's reply; None where there is none."""


@dataclass(frozen=True)
class Verdict:
    """A score of 0 to 1, and the judge's replies that it was read from."""

    score: float
    judgments: list[str]


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
        if not self.url:
            return ""
        name = f"{self.model} {self.mode}"
        if self.options:
            name += f" {json.dumps(self.options, sort_keys=True, default=str)}"
        return name

    def check(self) -> None:
        """UserError if a value is out of range or not a URL."""
        if self.mode not in MODES:
            raise UserError(
                f"judge.mode={self.mode} is unknown; choose one of {', '.join(MODES)}",
                field="judge.mode",
                code="unknown",
            )
        if self.parallel < 1:
            raise UserError(f"judge.parallel={self.parallel} must be at least 1", field="judge.parallel", code="range")
        if self.url:
            check_url("judge.url", self.url)

    def score(self, sample: Sample, rows: Sequence[ResultRow]) -> list[ResultRow]:
        """The rows of a sample, the full cache's first, with their scores and the judge's replies as `judgments`.

        BadRow: there is no verdict on one of the answers, or a content filter refuses it. UserError: no answer at all.
        """
        if not sample.judge:
            return list(rows)
        talks = list(map(_talk, rows))
        unscored: dict[Talk, None] = {}  # each once, in order
        for talk, row in zip(talks, rows, strict=True):
            if math.isnan(row.score):
                unscored[talk] = None
        judge = functools.partial(self._judge, sample, full=talks[0])
        with ThreadPoolExecutor(self.parallel) as pool:
            verdicts = dict(zip(unscored, pool.map(judge, unscored), strict=True))
        scored = []
        for talk, row in zip(talks, rows, strict=True):
            if talk in verdicts:
                row = replace(row, **vars(verdicts[talk]))
            scored.append(row)
        return scored

    def _judge(self, sample: Sample, talk: Talk, full: Talk) -> Verdict:
        """The verdict on a variant's answers; `full` are the full cache's."""
        if sample.metric == "helmet-answer":
            return self._rate(sample, talk, sample.metric, _read_correctness)
        if sample.metric in HELMET_JUDGED:
            return self._mark_summary(sample, talk)
        if self.mode == "pairwise":
            return self._compare(sample, talk, full)
        if sample.metric == LONGBENCH_WRITE:
            return self._rate(sample, talk, LONGBENCH_WRITE, _mean_mark)
        return self._rate(sample, talk, _prompt_name("single", sample), _rating)

    def _rate(self, sample: Sample, talk: Talk, prompt_name: str, read: Reader) -> Verdict:
        score, reply = self._ask(prompt_name, sample, talk, talk, read)
        return Verdict(score, [reply])

    def _mark_summary(self, sample: Sample, talk: Talk) -> Verdict:
        """HELMET's score of a summary: fluency times F1 of its key points and its sentences."""
        key_points = len(sample.references) - 1
        fluency, of_fluency = self._ask("helmet-fluency", sample, talk, talk, _read_fluency)
        recall, of_recall = self._ask(
            "helmet-recall", sample, talk, talk, functools.partial(_read_recall, key_points=key_points)
        )
        precision, of_precision = self._ask("helmet-precision", sample, talk, talk, _read_precision)
        f1 = 0.0
        if recall + precision > 0:
            f1 = 2 * recall * precision / (recall + precision)
        return Verdict(fluency * f1, [of_fluency, of_recall, of_precision])

    def _compare(self, sample: Sample, talk: Talk, full: Talk) -> Verdict:
        """1 where the variant wins against the full cache in both orders, 0 where it loses in both, else 1/2."""
        if talk == full:
            return Verdict(0.5, [])  # both orders ask the judge the same: its verdicts cancel out
        name = _prompt_name("pair", sample)
        as_first, first_reply = self._ask(name, sample, talk, full, _winner)
        as_second, second_reply = self._ask(name, sample, full, talk, _winner)
        score = 0.5
        if as_first == -as_second:
            score += as_first / 2
        return Verdict(score, [first_reply, second_reply])

    def _ask(self, prompt_name: str, sample: Sample, talk_a: Talk, talk_b: Talk, read: Reader) -> tuple[float, str]:
        """What `read` finds in the judge's reply, and the reply; asks again if it finds nothing."""
        prompt = _prompts()[prompt_name]
        messages = []
        if prompt["system"]:
            messages.append({"role": "system", "content": prompt["system"]})
        fields = _prompt_fields(sample, talk_a, talk_b)
        messages.append({"role": "user", "content": fill_in(prompt["user"], fields)})

        reply = ""
        temperature = 0.5 if prompt_name == LONGBENCH_WRITE else 0.0
        for _ in range(_TRIES):
            body = {"messages": messages, "temperature": temperature, "max_tokens": _TOKENS}
            reply = self._complete(body, subject=f"{sample.task}/{sample.id}")
            verdict = read(reply)
            if verdict is not None:
                return verdict, reply
            temperature = 0.5
        raise BadRow(
            f"judge.model={self.model}: no verdict on {sample.task}/{sample.id} in {_TRIES} tries, the last said "
            f"{reply[-80:]!r}; choose another judge, or let it write more: judge.options={{max_tokens: 8192}}",
            field="judge.model",
            code="data",
        )

    def _complete(self, body: Mapping[str, Any], subject: str) -> str:
        """The judge's reply; `subject` names what is judged in messages."""
        body = self._with_options({"model": self.model, **body})
        while True:
            try:
                return self._endpoint.post("chat/completions", body, _content)
            except EndpointError as error:
                if error.is_filter or (error.status and _TOO_LONG.search(error.body)):
                    raise BadRow(
                        f"judge.url={self.url}: no judgment of {subject} ({error})", field="judge.url", code="service"
                    ) from None
                accepted = body
                if error.status in (400, 422):
                    accepted = self._without_refused(body, error.body)
                if accepted == body:
                    raise UserError(
                        f"judge.url={self.url}: no judgment ({error}); run the command again",
                        field="judge.url",
                        code="service",
                    ) from None
                body = accepted

    @functools.cached_property
    def _endpoint(self) -> Endpoint:
        return Endpoint(str(self.url), self.key, _TRIES)

    def _with_options(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The request with `options`; a limit of tokens among them replaces the usual one under either name."""
        limits = {"max_tokens", "max_completion_tokens"}
        request = dict(body)
        if limits & self.options.keys():
            for name in limits & request.keys():
                del request[name]
        request.update(self.options)
        return {name: value for name, value in request.items() if value is not None}

    def _without_refused(self, body: Mapping[str, Any], reason: str) -> dict[str, Any]:
        """The request without the parameter that a refusal names: reasoning models take other ones."""
        request = dict(body)
        if "max_tokens" in reason and "max_tokens" in body:
            request["max_completion_tokens"] = request.pop("max_tokens")
        elif "temperature" in reason and "temperature" not in self.options:
            request.pop("temperature", None)
        return request


_TOO_LONG = re.compile(r"context.?(length|window)|too long", re.IGNORECASE)
"""What refusals of prompts that the judge has no room for say."""


def _content(response: Any) -> str:
    """The text of a response, empty where thinking took all tokens; EndpointError if a content filter stopped it."""
    choice = response["choices"][0]
    refuse_filtered(choice)
    content = choice["message"]["content"]
    if content is not None and not isinstance(content, str):
        raise TypeError(f"the content of the reply is no text but {content!r:.60}")
    return content or ""


# What the judge is asked


def _talk(row: ResultRow) -> Talk:
    return tuple(map(str.strip, [*(row.before or []), row.answer]))


_GENERAL_VERSIONS = {"single": "v1", "pair": "v2"}
"""FastChat's version of the prompt for questions without a reference, by kind."""


def _prompt_name(kind: str, sample: Sample) -> str:
    version = "math-v1" if sample.references else _GENERAL_VERSIONS[kind]
    turns = "-multi-turn" if sample.earlier else ""
    return f"{kind}-{version}{turns}"


@functools.lru_cache(maxsize=1)
def _prompts() -> dict[str, dict[str, str]]:
    return package_yaml("keepsight.eval", "judge")


def _prompt_fields(sample: Sample, talk_a: Talk, talk_b: Talk) -> dict[str, str]:
    """What a prompt of the judge may name: `question_1`, `ref_answer_1`, `answer_a_1`, ..., and HELMET's fields."""
    texts = {
        "question": (*sample.earlier, sample.prompt),
        "ref_answer": sample.references,
        "answer_a": talk_a,
        "answer_b": talk_b,
    }
    fields = {}
    for name, text_of_turns in texts.items():
        for turn, text in enumerate(text_of_turns, start=1):
            fields[f"{name}_{turn}"] = text
    fields["asked"] = sample.question.strip()
    fields["answers"] = "; ".join(sample.references)
    points = []
    for number, text in enumerate(sample.references[1:], start=1):
        points.append(f"{number}. {text}")
    fields["points"] = "\n".join(points)
    return fields


# What the judge has said


_QUOTED = (
    re.compile(r"(```|~~~).*?(?:\1|\Z)", re.DOTALL),
    re.compile(r"`[^`\n]*`|\"[^\"\n]*\"|“[^”]*”|«[^»]*»|'\[[^'\n]*\]'|^\s*>.*$", re.MULTILINE),
)


_THINKING = r"(?:\w+:)?(?:think|thinking|thought|reasoning)\s*"
_THOUGHT = re.compile(rf"</{_THINKING}>|\[/think\]|◁/{_THINKING}▷|<\|channel\|>final<\|message\|>", re.IGNORECASE)
_THINKS = re.compile(rf"<{_THINKING}>|\[think\]|◁{_THINKING}▷|<\|channel\|>analysis<\|message\|>", re.IGNORECASE)
"""The ends and beginnings of thinking: as most models mark them, Mistral's, Kimi's, and gpt-oss's channels."""


def _conclusion(reply: str) -> str:
    """The judge's reply without its thinking, whose beginning may be part of the prompt and whose end may be cut."""
    return _THINKS.split(_THOUGHT.split(reply)[-1])[0]


def _verdict(reply: str) -> str:
    """The judge's reply without its thinking and its quotations."""
    reply = _conclusion(reply)
    for quoted in _QUOTED:
        reply = quoted.sub("", reply)
    return reply


def _rating(reply: str) -> float | None:
    """The last number in double brackets, else in single ones, of 1 to 10; FastChat takes the first one anywhere."""
    verdict = _verdict(reply)
    ratings = re.findall(r"\[\[(\d+\.?\d*)\]\]", verdict) or re.findall(r"\[(\d+\.?\d*)\]", verdict)
    if not ratings or not 1 <= float(ratings[-1]) <= 10:
        return None
    return float(ratings[-1]) / 10


def _winner(reply: str) -> float | None:
    """The last verdict: 1 for assistant A, -1 for B, 0 for a tie."""
    winners = re.findall(r"\[\[([ABC])\]\]", _verdict(reply))
    return {"A": 1.0, "B": -1.0, "C": 0.0}[winners[-1]] if winners else None


def _read_fluency(reply: str) -> float | None:
    """HELMET's fluency, 0 or 1."""
    fluency = _last_counts(reply).get("fluency")
    return float(fluency) if fluency in (0, 1) else None


def _read_correctness(reply: str) -> float | None:
    """HELMET's mark of an answer: its fluency times its correctness of 0 to 3."""
    fluency = _read_fluency(reply)
    correctness = _share(_last_counts(reply).get("correctness"), 3)
    if fluency is None or correctness is None:
        return None
    return fluency * correctness


def _read_recall(reply: str, key_points: int) -> float | None:
    """The share of the key points that a summary holds."""
    return _share(_last_counts(reply).get("recall"), key_points)


def _read_precision(reply: str) -> float | None:
    """The share of a summary's sentences that the reference supports."""
    counts = _last_counts(reply)
    return _share(counts.get("precision"), counts.get("sentences"))


def _last_counts(reply: str) -> dict[str, int]:
    """The last JSON object in the judge's reply; empty where there is none, or its values are not whole numbers."""
    objects = re.findall(r"\{[^{}]*\}", _conclusion(reply))
    if not objects:
        return {}
    try:
        return dict(from_json(objects[-1].encode(), dict[str, int]))
    except ValueError:
        return {}


def _share(count: int | None, most: int | None) -> float | None:
    if count is None or not most or not 0 <= count / most <= 1:
        return None
    return count / most


def _mean_mark(reply: str) -> float | None:
    """LongWriter's: the mean over the six dimensions, 1 as 0 and 5 as 1."""
    reply = _conclusion(reply)
    fenced = re.findall(r"```json\n(.*?)\n```", reply, re.DOTALL)
    if fenced:
        reply = fenced[-1]
    try:
        by_dimension = from_json(reply.replace("\n", "").encode(), dict[str, Any])
        marks = [(float(str(by_dimension[dimension])) - 1) / 4 for dimension in _MARKS]  # True is no mark
    except (ValueError, KeyError, TypeError):
        return None
    if not all(0 <= mark <= 1 for mark in marks):  # NaN is neither
        return None
    return sum(marks) / len(marks)
