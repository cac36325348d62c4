"""Which requests reach vLLM's server: those of the listed paths alone, with the API key where there is one.

vLLM's own check guards only paths that begin with `/v1` and a few others. Here everything that is not listed is closed,
so that an endpoint of a new version is closed too.
"""

import hmac
import json
import os
from collections.abc import Mapping
from typing import Any

from keepsight.errors import UserError
from keepsight.serving.hosts import ANY, names_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PATHS = (CHAT, COMPLETIONS)
"""Endpoints that answer; the middleware reads their bodies."""
TOKENIZER_PATHS = ("/tokenize", "/detokenize")
"""Endpoints with a body that compute nothing."""
STATUS_PATHS = ("/health", "/metrics", "/v1/models", "/version", "/ping", "/load")
METHODS = {"GET": STATUS_PATHS, "HEAD": STATUS_PATHS, "POST": (*PATHS, *TOKENIZER_PATHS)}
"""The paths that are open, by method."""
WITHOUT_KEY = ("/health",)
METRICS = "/metrics"
OPEN_METRICS = "KEEPSIGHT_OPEN_METRICS"
"""The variable that opens `/metrics` to requests without a key, if it is 1."""
STOPPING = "KEEPSIGHT_STOPPING"
"""The variable that names a file; once it exists, the server is told to stop, and answers no further request.

vLLM itself would reply to new requests with 200 and nothing while it waits for the running ones.
"""

HOSTS = "KEEPSIGHT_HOSTS"
"""The variable with names by which clients may call the server, as JSON; see `keepsight.serving.guard`.

By default any where the server has a key, else that of its address.
"""

ORIGINS = "KEEPSIGHT_ORIGINS"
"""The variable with the origins of web pages that may use the server, as JSON; by default vLLM's `--allowed-origins`.

vLLM's own default, which is any, is not taken: any page that somebody opens could then use a server without a key.
"""

MAX_BUDGET = "KEEPSIGHT_MAX_BUDGET"
"""The variable with the largest budget that a request may choose; the method's own if it is not set."""

ADAPTERS = "KEEPSIGHT_ADAPTERS"
"""The variable with the names of the worker's adapters that a request may choose, as JSON."""

GRACE = "KEEPSIGHT_GRACE"
"""The variable with the seconds that running answers have from then on; unlimited if it is not set."""


def is_stopping() -> bool:
    """Whether the server has been told to stop."""
    return os.path.exists(os.environ.get(STOPPING, ""))


def path_of(scope: Mapping[str, Any]) -> str:
    """The path that Starlette's routes see: without the root path of a proxy."""
    path = str(scope.get("path", ""))
    root = str(scope.get("root_path", ""))
    if root and path.startswith(f"{root}/"):
        return path[len(root) :]
    return path


def is_listed(scope: Mapping[str, Any]) -> bool:
    """Whether a request is for an endpoint that is open."""
    return path_of(scope) in METHODS.get(scope["method"], ())


def needs_key(scope: Mapping[str, Any]) -> bool:
    """Whether a server with an API key asks for it."""
    path = path_of(scope)
    is_open = path in WITHOUT_KEY or (path == METRICS and os.environ.get(OPEN_METRICS) == "1")
    return not (is_open and is_listed(scope))


def is_preflight(scope: Mapping[str, Any]) -> bool:
    """Whether a browser asks what another site's page may send: such a request has no key, and reaches no endpoint."""
    header_names = {name for name, _ in scope["headers"]}
    return scope["method"] == "OPTIONS" and {b"origin", b"access-control-request-method"} <= header_names


def arguments_of(scope: Mapping[str, Any]) -> Any:
    """The arguments that the server of a request was started with; None where they are not known."""
    return getattr(getattr(scope.get("app"), "state", None), "args", None)


def hosts_of(scope: Mapping[str, Any]) -> list[str]:
    """Names by which clients may call the server of a request, beside the local ones."""
    variable = os.environ.get(HOSTS)
    if variable:
        return names_in(HOSTS, variable)
    if _keys_of(scope):
        return [ANY]
    return names_of(getattr(arguments_of(scope), "host", None) or "0.0.0.0")


def origins_of(scope: Mapping[str, Any]) -> list[str]:
    """Origins of web pages that may use the server of a request."""
    variable = os.environ.get(ORIGINS)
    if variable:
        return names_in(ORIGINS, variable)
    allowed = getattr(arguments_of(scope), "allowed_origins", None) or []
    return [] if allowed == [ANY] else allowed


def names_in(name: str, variable: str) -> list[str]:
    """The texts in the JSON of a variable of this name.

    Raises:
        UserError: it holds something else.
    """
    try:
        values = json.loads(variable)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UserError(
            f'{name}={variable}: must be a list of texts as JSON, such as ["api.example.com"]', field=name, code="type"
        )
    return values


def _keys_of(scope: Mapping[str, Any]) -> list[str]:
    """The API keys of a server."""
    keys = getattr(arguments_of(scope), "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return [key for key in keys if key]


def has_key(scope: Mapping[str, Any]) -> bool:
    """Whether a request has a valid API key, or the server has none."""
    server_keys = _keys_of(scope)
    if not server_keys:
        return True

    authorization = b""
    for name, value in scope["headers"]:
        if name == b"authorization":
            authorization = value
            break
    scheme, _, key_of_request = authorization.partition(b" ")
    # All keys are compared, so that the time does not tell which one matches.
    matches = [hmac.compare_digest(key_of_request, key.encode()) for key in server_keys]
    return scheme.lower() == b"bearer" and any(matches)
