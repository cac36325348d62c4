"""Answers from a server: any endpoint of OpenAI's completions protocol, such as those of vLLM, SGLang or llama.cpp."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from keepsight.data_gen.answers import AnsweredPrompts, Rendered
from keepsight.endpoint import Endpoint, EndpointError, ServerSettings
from keepsight.errors import UserError
from keepsight.models.targets import Target

_UNKNOWN_FORM = (400, 404, 422)
"""Statuses with which servers refuse prompts in a form that they do not know; 404 is also an unknown model."""


class Server:
    """Answers of a server. Prompts are sent as token ids, or as text to a server that takes no ids.

    vLLM returns the answer's token ids; the text that others return is tokenised, which gives the ids that were
    generated, except for rare words that the model spelt in an unusual way.
    """

    def __init__(self, target: Target, settings: ServerSettings) -> None:
        settings.check()
        assert settings.url is not None
        self._target, self._settings = target, settings
        self._endpoint = Endpoint(settings.url, settings.key, settings.tries)
        self._forms = [self._ids_both_ways, self._ids, self._text]

    def __call__(self, prompts: list[Rendered], max_new_tokens: int) -> Iterator[AnsweredPrompts]:
        """See `Backend`; when an answer cannot be had, no further prompt is sent.

        Raises:
            UserError: the server is gone, refuses a prompt, or reads it as other tokens.
        """
        first, *others = prompts
        yield [(first, self._in_a_known_form(first, max_new_tokens))]
        waiting, done, stopped = SimpleQueue[Rendered](), SimpleQueue[Any](), threading.Event()
        for prompt in others:
            waiting.put(prompt)

        def work() -> None:
            try:
                while not stopped.is_set():
                    prompt = waiting.get_nowait()
                    done.put((prompt, self._ask(prompt, max_new_tokens, stopped)))
                done.put(Empty())
            except Exception as error:  # Empty, too: nothing is left to ask
                done.put(error)

        running, failure = min(self._settings.parallel, len(others)), None
        for _ in range(running):
            threading.Thread(target=work, daemon=True).start()  # Ctrl-C does not wait for what it has asked
        try:
            while running:
                if not isinstance(result := done.get(), Exception):
                    yield [result]
                    continue
                running -= 1
                if not isinstance(result, Empty):
                    failure = failure or result
                    stopped.set()  # what the others have asked is still waited for
        finally:
            stopped.set()
        if failure:
            raise failure

    def _in_a_known_form(self, prompt: Rendered, max_new_tokens: int) -> list[int]:
        """The answer to a prompt in the first of the forms that the server takes; the others are forgotten."""
        while True:
            try:
                return self._post(prompt, max_new_tokens, threading.Event())
            except EndpointError as error:
                if error.status not in _UNKNOWN_FORM or len(self._forms) == 1:
                    raise self._failure(error) from None
                self._forms.pop(0)

    def _ask(self, prompt: Rendered, max_new_tokens: int, stopped: threading.Event) -> list[int]:
        try:
            return self._post(prompt, max_new_tokens, stopped)
        except EndpointError as error:
            raise self._failure(error) from None

    def _post(self, prompt: Rendered, max_new_tokens: int, stopped: threading.Event) -> list[int]:
        body = {"model": self._settings.model or self._target.name, "max_tokens": max_new_tokens, "temperature": 0.0}
        reply = self._endpoint.post("completions", body | self._forms[0](prompt), _Completion.read, stopped)
        if reply.prompt_tokens not in (None, len(prompt.ids)):
            raise UserError(
                f"server.url={self._endpoint.url}: it read prompt {prompt.index} as {reply.prompt_tokens} tokens, "
                f"not as {len(prompt.ids)}; it must serve {self._target.name!r}"
            )
        if reply.reason == "length" and (reply.answer_tokens or max_new_tokens) < max_new_tokens:
            raise UserError(
                f"server.url={self._endpoint.url}: prompt {prompt.index} has {len(prompt.ids)} tokens, which leaves no "
                f"room for {max_new_tokens} more; serve it with a longer context"
            )
        ids = reply.ids if reply.ids is not None else self._tokenised(reply)
        if not ids or max(ids) >= self._target.vocabulary:
            raise UserError(
                f"server.url={self._endpoint.url}: its answer to prompt {prompt.index} is empty or has tokens outside "
                f"the vocabulary; it must serve {self._target.name!r}"
            )
        return ids[:max_new_tokens]

    def _tokenised(self, reply: "_Completion") -> list[int]:
        ids = list(self._target.tokenizer(reply.text, add_special_tokens=False)["input_ids"])
        return [*ids, self._end] if reply.reason == "stop" else ids

    @property
    def _end(self) -> int:
        """The token that is taken to have ended an answer of which only the text is known."""
        ends, usual = self._target.end_tokens, self._target.tokenizer.eos_token_id
        return usual if usual in ends else ends[0]

    def _ids_both_ways(self, prompt: Rendered) -> dict[str, Any]:
        return {"prompt": prompt.ids, "return_token_ids": True}

    def _ids(self, prompt: Rendered) -> dict[str, Any]:
        return {"prompt": prompt.ids}

    def _text(self, prompt: Rendered) -> dict[str, Any]:
        """The text from which the tokenizer, with the special tokens that it adds by itself, makes the prompt's ids."""
        tokenizer = self._target.tokenizer
        for ids in (prompt.ids, prompt.ids[1:]):
            text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
            if list(tokenizer(text)["input_ids"]) == prompt.ids:
                return {"prompt": text}
        raise UserError(
            f"server.url={self._endpoint.url}: it takes no token ids, and no text stands for the ids of prompt "
            f"{prompt.index}; use a server that takes ids, such as vLLM's"
        )

    def _failure(self, error: EndpointError) -> UserError:
        again = "run the same command again to go on"
        return UserError(
            f"server.url={self._endpoint.url}: no answer ({error}); what was answered is kept: "
            + (f"once this is mended, {again}" if error.status else again)
        )


@dataclass(frozen=True)
class _Completion:
    """What a reply holds: the answer, as ids where the server returns them, why it ended, and the counts of tokens."""

    text: str
    ids: list[int] | None
    reason: str | None
    prompt_tokens: int | None
    answer_tokens: int | None

    @classmethod
    def read(cls, reply: Any) -> "_Completion":
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        ids, reason = choice.get("token_ids"), choice.get("finish_reason")
        if reason not in ("stop", "length", None):
            raise ValueError(f"the answer is cut: finish_reason={reason}")  # vLLM and SGLang abort it when they end
        return cls(
            str(choice["text"]),
            None if ids is None else [int(token) for token in ids],
            reason,
            usage.get("prompt_tokens"),
            usage.get("completion_tokens"),
        )
