"""A judge: an OpenAI-compatible endpoint on this machine that says what a test wants."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.data_gen.served import Heard, Reply, server


@contextmanager
def endpoint(say: Callable[[dict[str, Any]], str | int | tuple[int, Any] | dict[str, Any]]) -> Iterator[Heard]:
    """An endpoint that answers a request with the text or choice of `say`, or a status of failure and its reason."""

    def reply(body: dict[str, Any]) -> Reply:
        said = say(body)
        if isinstance(said, int):
            return said, {"error": "no"}
        if isinstance(said, tuple):
            return said[0], {"error": said[1]}
        choice = said if isinstance(said, dict) else {"message": {"role": "assistant", "content": said}}
        return 200, {"choices": [choice]}

    with server(reply, path="/v1/chat/completions") as heard:
        yield heard
