"""Offers a tool to a model as one real client does; runs in the environment of `make setup-clients`.

    python call.py CLIENT URL FOLDER < CASES

CASES is {"prompt": TEXT, "tool": TOOL, "extra": FIELDS}, FIELDS being further ones of the request. Prints a JSON list
of {"name", "arguments"}, the calls of each answer.
"""

import json
import os
import sys
from pathlib import Path

MODEL = "tiny"
KEY = "any"


def chat(prompt):
    return [{"role": "user", "content": prompt}]


def with_openai(url, cases, folder):
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    options = {"model": MODEL, "messages": chat(cases["prompt"]), "tools": [cases["tool"]], "max_tokens": 200}
    options["extra_body"] = cases["extra"]
    reply = client.chat.completions.create(**options)
    assert reply.choices[0].finish_reason == "tool_calls"
    found = [
        {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        for call in reply.choices[0].message.tool_calls
    ]
    with client.chat.completions.stream(**options) as stream:
        completion = stream.get_final_completion()
    found += [
        {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        for call in completion.choices[0].message.tool_calls
    ]
    return found


def with_litellm(url, cases, folder):
    import litellm

    options = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY, "max_tokens": 200, "num_retries": 0}
    options["extra_body"] = cases["extra"]
    reply = litellm.completion(messages=chat(cases["prompt"]), tools=[cases["tool"]], **options)
    chunks = list(litellm.completion(messages=chat(cases["prompt"]), tools=[cases["tool"]], stream=True, **options))
    joined = litellm.stream_chunk_builder(chunks, messages=chat(cases["prompt"]))
    return [
        {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        for answer in (reply, joined)
        for call in answer.choices[0].message.tool_calls
    ]


def with_langchain(url, cases, folder):
    from langchain_openai import ChatOpenAI

    options = {"base_url": f"{url}/v1", "api_key": KEY, "max_retries": 0, "extra_body": cases["extra"]}
    model = ChatOpenAI(model=MODEL, max_tokens=200, **options)
    bound = model.bind_tools([cases["tool"]])
    whole = bound.invoke(cases["prompt"])
    streamed = None
    for chunk in bound.stream(cases["prompt"]):
        streamed = chunk if streamed is None else streamed + chunk
    return [
        {"name": call["name"], "arguments": call["args"]} for answer in (whole, streamed) for call in answer.tool_calls
    ]


def with_llm(url, cases, folder):
    os.environ["LLM_USER_PATH"] = folder
    described = {"model_id": MODEL, "model_name": MODEL, "api_base": f"{url}/v1", "api_key_name": "keepsight"}
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps([described | {"supports_tools": True}]))
    import llm

    function = cases["tool"]["function"]
    tool = llm.Tool(function["name"], function["description"], function["parameters"], lambda **_: "warm")
    found = []
    for stream in (False, True):
        reply = llm.get_model(MODEL).prompt(cases["prompt"], tools=[tool], stream=stream, key=KEY, max_tokens=200)
        found += [{"name": call.name, "arguments": call.arguments} for call in reply.tool_calls()]
    return found


CLIENTS = {
    "openai": with_openai,
    "litellm": with_litellm,
    "langchain-openai": with_langchain,
    "llm": with_llm,
}

if __name__ == "__main__":
    client, url, folder = sys.argv[1:]
    print("\n" + json.dumps(CLIENTS[client](url, json.load(sys.stdin), folder)))
