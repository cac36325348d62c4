"""Run a Python program in a fork of the process behind a socket, `tests/warm.py`: THIS SOCKET PROGRAM ARGUMENT...

It needs nothing outside the standard library, and starts without `site`.
"""

import json
import os
import signal
import socket
import sys


def main(address: str, *command: str) -> int:
    """Returns the program's exit status, which is negative where a signal ended it."""
    with socket.socket(socket.AF_UNIX) as warm:
        warm.connect(address)
        request = {"command": command, "folder": os.getcwd(), "environment": dict(os.environ)}
        text = json.dumps(request).encode()
        socket.send_fds(warm, [len(text).to_bytes(8, "big")], [0, 1, 2])
        warm.sendall(text)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: warm.sendall(bytes([number])))
        return int(warm.recv(16) or -signal.SIGKILL)


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
