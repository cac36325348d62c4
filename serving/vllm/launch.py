"""vLLM's server as a child of `keepsight serve`: it ends when the process that holds its standard input has ended."""

import os
import runpy
import signal
import threading
import time

_GRACE = 10
"""Seconds that the server has to end in."""


def _end_with_parent() -> None:
    while os.read(0, 1 << 12):  # a reader of sys.stdin would hold a lock that the interpreter takes when it ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)  # vLLM may wait for answers that its engine, already gone, never ends
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
