"""keepsight serve: an OpenAI server over batched decoding from evicted caches."""

import os
import sys
from contextlib import closing

from keepsight.commands import serve_vllm
from keepsight.commands.config_serving import Serve as Config
from keepsight.commands.from_recipe import resources_later, resources_of, target_of
from keepsight.commands.variants import method_of
from keepsight.errors import UserError, printable
from keepsight.serving.engine import Engine

_GRACE = 30
"""Seconds that answers under way have to end in, once the server is told to end."""


def run(config: Config) -> None:
    """Serve until interrupted."""
    if config.vllm:
        serve_vllm.run(config)
        return
    if given := [name for name in serve_vllm.KEYS if getattr(config, name)]:
        raise UserError(f"{given[0]}= is for vLLM's server; leave it out, or add vllm=true")
    try:
        import uvicorn

        from keepsight.serving.server import Service
    except ImportError as error:
        raise UserError(f"keepsight serve needs {error.name}; run `pip install 'keepsight[serving]'`") from None
    method_of(config, resources_later(config))  # bad values end here, before anything loads
    key = os.environ.get(config.key) or None
    with closing(serve_vllm.listening(config.host, config.port)) as listening:
        target = target_of(config)
        method = method_of(config, resources_of(config, target))
        batch = {"rows": config.rows, "waiting": config.waiting, "max_prompt_tokens": config.max_prompt_tokens}
        with Engine(target.model, method, **batch) as engine:
            name = config.name or target.public_name
            limits = {"answer_tokens": config.max_new_tokens, "max_bytes": config.max_bytes}
            app = Service(engine, target, name=name, key=key, **limits).app()
            host, port = listening.getsockname()[:2]
            asks = f"requests need the key in {config.key}" if key else "requests need no key"
            how = f"{config.method}, budget {config.budget}"
            print(printable(f"serving {name} at http://{host}:{port}/v1 with {how}; {asks}"))
            request = serve_vllm.request_line(f"http://{host}:{port}/v1", name, config.key if key else None)
            print(printable(f"next: {request}"))
            sys.stdout.flush()
            settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_GRACE, lifespan="off")
            try:
                uvicorn.Server(settings).run(sockets=[listening])
            except KeyboardInterrupt:
                print("stopped", file=sys.stderr)
