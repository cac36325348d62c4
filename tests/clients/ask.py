"""Asks a server as one real client does; runs in the environment of `make setup-clients`, which has no keepsight.

    python ask.py CLIENT URL FOLDER < CASES

CASES is {"prompts": [...], "tokens": N, "schema": {...}}. Prints a JSON list of answers: {"kind", "prompt", "text"}.
"""

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path

MODEL = "tiny"
KEY = "any"


def chat(prompt):
    return [{"role": "user", "content": prompt}]


def joined(chunks):
    """The text of a streamed chat."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def with_openai(url, cases, folder):
    import openai

    options = {"model": MODEL, "max_tokens": cases["tokens"], "temperature": 0}
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    answers = []
    for prompt in cases["prompts"][:4]:
        reply = client.chat.completions.create(messages=chat(prompt), **options)
        assert reply.usage.completion_tokens <= cases["tokens"]
        answers.append(("chat", prompt, reply.choices[0].message.content))
        chunks = client.chat.completions.create(messages=chat(prompt), stream=True, **options)
        answers.append(("chat", prompt, joined(chunks)))
        reply = client.completions.create(prompt=prompt, **options)
        answers.append(("completion", prompt, reply.choices[0].text))
        chunks = client.completions.create(prompt=prompt, stream=True, **options)
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        answers.append(("completion", prompt, text))
    prompts = cases["prompts"][:3]
    reply = client.completions.create(prompt=prompts, **options)
    for prompt, choice in zip(prompts, reply.choices, strict=True):
        answers.append(("completion", prompt, choice.text))

    schema = {"type": "json_schema", "json_schema": {"name": "ship", "strict": True, "schema": cases["schema"]}}
    longer = options | {"max_tokens": 400}
    reply = client.chat.completions.create(messages=chat("A ship?"), response_format=schema, **longer)
    answers.append(("json", "", reply.choices[0].message.content))
    reply = client.chat.completions.create(messages=chat("A ship?"), logprobs=True, top_logprobs=2, **options)
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2

    endless = options | {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(prompt=cases["prompts"][0], stream=True, **endless)
    assert len(list(itertools.islice(stream, 3))) == 3
    stream.close()  # nobody reads the rest
    try:
        client.chat.completions.create(messages=chat("A ship?"), **(options | {"max_tokens": 0}))
    except openai.BadRequestError as error:
        answers.append(("refused", "max_tokens", error.body["message"]))

    async def all_at_once():
        async_client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        requests = [async_client.completions.create(prompt=prompt, **options) for prompt in cases["prompts"]]
        return await asyncio.gather(*requests)

    replies = asyncio.run(all_at_once())
    for prompt, reply in zip(cases["prompts"], replies, strict=True):
        answers.append(("completion", prompt, reply.choices[0].text))
    return answers


def with_litellm(url, cases, folder):
    import litellm

    shared = {
        "api_base": f"{url}/v1",
        "api_key": KEY,
        "max_tokens": cases["tokens"],
        "temperature": 0,
        "num_retries": 0,
    }
    chat_options = shared | {"model": f"openai/{MODEL}"}
    text_options = shared | {"model": f"text-completion-openai/{MODEL}"}
    answers = []
    for prompt in cases["prompts"][:4]:
        reply = litellm.completion(messages=chat(prompt), **chat_options)
        answers.append(("chat", prompt, reply.choices[0].message.content))
        chunks = litellm.completion(messages=chat(prompt), stream=True, **chat_options)
        answers.append(("chat", prompt, joined(chunks)))
        reply = litellm.text_completion(prompt=prompt, **text_options)
        answers.append(("completion", prompt, reply.choices[0].text))

    async def all_at_once():
        requests = [litellm.acompletion(messages=chat(prompt), **chat_options) for prompt in cases["prompts"]]
        return await asyncio.gather(*requests)

    replies = asyncio.run(all_at_once())
    for prompt, reply in zip(cases["prompts"], replies, strict=True):
        answers.append(("chat", prompt, reply.choices[0].message.content))
    return answers


def with_langchain(url, cases, folder):
    from langchain_openai import ChatOpenAI, OpenAI

    options = {"model": MODEL, "base_url": f"{url}/v1", "api_key": KEY, "temperature": 0, "max_retries": 0}
    chat_model = ChatOpenAI(max_tokens=cases["tokens"], **options)
    text_model = OpenAI(max_tokens=cases["tokens"], **options)
    answers = []
    for prompt in cases["prompts"][:4]:
        answers.append(("chat", prompt, chat_model.invoke(prompt).content))
        streamed = "".join(chunk.content for chunk in chat_model.stream(prompt))
        answers.append(("chat", prompt, streamed))
    for prompt in cases["prompts"][:2]:
        answers.append(("completion", prompt, text_model.invoke(prompt)))
    replies = chat_model.batch(cases["prompts"], config={"max_concurrency": 32})
    for prompt, reply in zip(cases["prompts"], replies, strict=True):
        answers.append(("chat", prompt, reply.content))
    schema = cases["schema"] | {"title": "ship", "description": "A ship."}
    ship_model = ChatOpenAI(max_tokens=400, **options).with_structured_output(schema, method="json_schema")
    answers.append(("json", "", json.dumps(ship_model.invoke("A ship?"))))
    return answers


def with_llm(url, cases, folder):
    os.environ["LLM_USER_PATH"] = folder
    model_of_server = {"model_id": MODEL, "model_name": MODEL, "api_base": f"{url}/v1", "api_key_name": "keepsight"}
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps([model_of_server]))
    import llm

    model = llm.get_model(MODEL)
    answers = []
    for prompt in cases["prompts"][:4]:
        for stream in (True, False):
            reply = model.prompt(prompt, stream=stream, key=KEY, temperature=0, max_tokens=cases["tokens"])
            answers.append(("chat", prompt, reply.text()))
    return answers


def with_inspect(url, cases, folder):
    import inspect_ai
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.solver import generate

    config = GenerateConfig(temperature=0, max_tokens=cases["tokens"], max_connections=32, max_retries=0)
    model = get_model(f"openai-api/keepsight/{MODEL}", base_url=f"{url}/v1", api_key=KEY, config=config)
    task = inspect_ai.Task(dataset=[Sample(input=prompt) for prompt in cases["prompts"]], solver=[generate()])
    (log,) = inspect_ai.eval(task, model=model, log_dir=folder, display="none")
    assert log.status == "success", log.error
    return [("chat", sample.input, sample.output.completion) for sample in log.samples]


TASK = """
task: ships
dataset_path: json
dataset_kwargs: {data_files: {test: %(file)s}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "never"
generation_kwargs: {until: ["never said"], max_gen_toks: %(tokens)d, temperature: 0, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def with_lm_eval(url, cases, folder):
    rows = Path(folder, "rows.jsonl")
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in cases["prompts"]))
    Path(folder, "ships.yaml").write_text(TASK % {"file": json.dumps(str(rows)), "tokens": cases["tokens"]})
    os.environ |= {"HF_HOME": folder, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": KEY}
    import lm_eval
    from lm_eval.tasks import TaskManager

    arguments = {
        "model": MODEL,
        "base_url": f"{url}/v1/completions",
        "num_concurrent": 32,
        "max_retries": 1,
        "tokenizer_backend": None,
        "tokenized_requests": False,
        "max_length": 4000,
    }
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=["ships"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    return [("completion", row["doc"]["prompt"], row["resps"][0][0]) for row in results["samples"]["ships"]]


CLIENTS = {
    "openai": with_openai,
    "litellm": with_litellm,
    "langchain-openai": with_langchain,
    "llm": with_llm,
    "inspect-ai": with_inspect,
    "lm-eval": with_lm_eval,
}

if __name__ == "__main__":
    client, url, folder = sys.argv[1:]
    answers = CLIENTS[client](url, json.load(sys.stdin), folder)
    print("\n" + json.dumps([{"kind": kind, "prompt": prompt, "text": text} for kind, prompt, text in answers]))
