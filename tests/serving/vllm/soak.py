"""Minutes of mixed requests to `keepsight serve vllm=true`: every answer is checked, and that memory stays flat.

    python -m tests.serving.vllm.soak seconds=600 requests=1000 clients=32

Prefixes of uniform and of ragged heads, ordinary prompts short and long, streamed and whole, chat and completions, on a
tiny random model; 5 percent are bad, and must end in a 4xx with a reason. It goes on until both the seconds have passed
and the requests are done, so that a slow machine takes longer, prints a line a minute, and ends with status 1 if
anything was wrong.
"""

import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.serving.vllm.stock import BLOCK, TOPICS, Case, Library, Server, chatted, completed, free_port, stock_target
from tests.serving.vllm.test_serve import KEY, long_case, started
from tests.serving.vllm.test_server import bad_requests

BAD_SHARE, GROWTH = 0.05, 1.05
"""Share of bad requests, and how much more memory than after the first fifth of the time is still flat."""


@dataclass
class Tally:
    """What the requests ended in.

    Attributes:
        done: Requests by kind.
        wrong: What was wrong, by kind.
        memory: Bytes of all processes, by second.
    """

    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)


def ask(server: Server, cases: dict[str, list[Case]], bad: list[Any], rng: random.Random, tally: Tally) -> None:
    """One request."""
    if rng.random() < BAD_SHARE:
        path, body, word = rng.choice(bad)
        headers = {"authorization": f"Bearer {KEY}"}
        reply = httpx.post(server.url + path, json={"model": "tiny", **body}, headers=headers, timeout=300)
        tally.done["bad"] += 1
        if not 400 <= reply.status_code < 500 or word not in reply.text:
            tally.wrong.append(f"bad: {reply.status_code} {reply.text[:200]}")
        return
    kind = rng.choice([*cases])
    case, tokens = rng.choice(cases[kind]), rng.randint(1, 24)
    try:
        found = rng.choice([completed, chatted])(server, case, tokens, key=KEY)
    except Exception as error:
        tally.wrong.append(f"{kind}: {type(error).__name__} {str(error)[:200]}")
    else:
        if found != case.answer[: len(found)] or len(found) != min(tokens, len(case.answer)):
            tally.wrong.append(f"{kind}: {found} in place of {case.answer[:tokens]}")
    tally.done[kind] += 1


def resident(pid: int) -> int:
    """Bytes of a process and all that it started."""
    parent = psutil.Process(pid)
    return sum(each.memory_info().rss for each in [parent, *parent.children(recursive=True)] if each.is_running())


def main(seconds: int = 600, requests: int = 1000, clients: int = 32) -> int:
    """Run; returns the exit status."""
    folder, tally = Path(tempfile.mkdtemp(prefix="soak-")), Tally()
    library = Library(stock_target(folder / "model"), folder / "prefixes")
    texts = [text[:1200] for text in TOPICS[:12]]
    cases = {
        "uniform": [each for text in texts[:6] for each in library.cases(text, 70)],
        "ragged": [each for text in texts[:6] for each in library.cases(text, 64, BLOCK)],
        "ordinary": [library.ordinary(text[:150]) for text in texts],
        "long": [long_case(library, text[at : at + 1200]) for text in TOPICS[:24] for at in (0, 900, 1800, 2700)],
    }
    (folder / "tenant").mkdir()
    bad = [*bad_requests(library, cases["uniform"][0], folder / "tenant", "0" * 32)]
    bad = [each for each in bad if "another base model" not in each[2]]
    stop, start = threading.Event(), time.monotonic()
    with started(library, free_port()) as server, ThreadPoolExecutor(clients) as pool:
        begin = time.monotonic()

        def watch() -> None:
            while not stop.wait(5):
                tally.memory.append((time.monotonic() - begin, resident(server.process.pid)))
                if len(tally.memory) % 12 == 0:
                    at, size = tally.memory[-1]
                    print(f"{at:.0f} s: {dict(tally.done)}, {len(tally.wrong)} wrong, {size >> 20} MiB", flush=True)

        def client(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() - begin < seconds or tally.done.total() < requests:
                ask(server, cases, bad, rng, tally)
                time.sleep(rng.random() * max(seconds * clients / requests - 1, 0) * 0.5)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        list(pool.map(client, range(clients)))
        stop.set()
        watcher.join()
        server.process.terminate()
        status = server.process.wait(90)
    known = {case.digest for case in (*cases["uniform"], *cases["ragged"])}
    left = [path.name for path in library.root.iterdir() if path.stem not in known]
    early = max((size for at, size in tally.memory if at < seconds / 5), default=1)
    late = max((size for at, size in tally.memory if at > seconds * 4 / 5), default=0)
    took = f"{time.monotonic() - begin:.0f} s, after {begin - start:.0f} to start"
    print(f"{tally.done.total()} requests in {took}: {dict(tally.done)}")
    print(f"memory: at most {early / 2**20:.0f} MiB in the first fifth of the time, {late / 2**20:.0f} in the last")
    print(f"ended with status {status}; files left: {left or 'none'}; wrong: {len(tally.wrong)}")
    for line in tally.wrong[:20]:
        print(f"  {line}")
    return int(bool(tally.wrong or left or status or late > early * GROWTH))


if __name__ == "__main__":
    sys.exit(main(**{name: int(value) for name, _, value in (each.partition("=") for each in sys.argv[1:])}))
