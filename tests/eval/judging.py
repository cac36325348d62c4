"""A judge: an OpenAI-compatible endpoint on this machine that says what a test wants."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.data_gen.served import Heard, Reply, server


@contextmanager
def endpoint(say: Callable[[dict[str, Any]], str | int | tuple[int, Any] | dict[str, Any]]) -> Iterator[Heard]:
    """An endpoint that answers a request with the text or choice of `say`, or a status of failure and its reason."""

    def reply(body: dict[str, Any]) -> Reply:
        answer = say(body)
        if isinstance(answer, int):
            return answer, {"error": "no"}
        if isinstance(answer, tuple):
            status, reason = answer
            return status, {"error": reason}
        if isinstance(answer, str):
            answer = {"message": {"role": "assistant", "content": answer}}
        return 200, {"choices": [answer]}

    with server(reply, path="/v1/chat/completions") as heard:
        yield heard
