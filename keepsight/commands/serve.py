"""keepsight serve: an OpenAI server over batched decoding from evicted caches."""

import os
import socket
import sys
from contextlib import closing

from keepsight.commands.config_serving import Evicting
from keepsight.commands.config_serving import Serve as Config
from keepsight.commands.from_recipe import resources_later, resources_of, target_of
from keepsight.errors import UserError, printable
from keepsight.runtime.generate import Method
from keepsight.runtime.methods import Resources, make_method
from keepsight.runtime.methods.make import takes
from keepsight.serving.engine import Engine

_GRACE = 30
"""Seconds that answers under way have to end in, once the server is told to end."""


def run(config: Config) -> None:
    """Serve until interrupted."""
    try:
        import uvicorn

        from keepsight.serving.server import Service
    except ImportError as error:
        raise UserError(f"keepsight serve needs {error.name}; run `pip install 'keepsight[serving]'`") from None
    method_of(config, resources_later(config))  # bad values end here, before anything loads
    key = os.environ.get(config.key) or None
    with closing(_listening(config.host, config.port)) as listening:
        target = target_of(config)
        method = method_of(config, resources_of(config, target))
        batch = {"rows": config.rows, "waiting": config.waiting, "max_prompt_tokens": config.max_prompt_tokens}
        with Engine(target.model, method, **batch) as engine:
            name = config.name or target.public_name
            limits = {"answer_tokens": config.max_new_tokens, "max_bytes": config.max_bytes}
            app = Service(engine, target, name=name, key=key, **limits).app()
            host, port = listening.getsockname()[:2]
            print(printable(f"{name} at http://{host}:{port}/v1, {method}, {'a key' if key else 'no key'} asked"))
            sys.stdout.flush()
            settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_GRACE, lifespan="off")
            try:
                uvicorn.Server(settings).run(sockets=[listening])
            except KeyboardInterrupt:
                print("stopped", file=sys.stderr)


def method_of(config: Evicting, resources: Resources, **options: object) -> Method:
    """The method; `options` take precedence over the configuration's."""
    budget = config.budget if takes(config.method, "budget") else None
    return make_method(config.method, budget, resources, **{**config.options, **options})


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens already, so that a port in use is known before the model is loaded."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise UserError(f"host={host} port={port}: {error}; choose others") from None
