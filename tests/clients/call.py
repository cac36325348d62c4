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


def calls_of(reply):
    """The calls of a chat completion of openai's and litellm's form."""
    calls = []
    for call in reply.choices[0].message.tool_calls:
        calls.append({"name": call.function.name, "arguments": json.loads(call.function.arguments)})
    return calls


def with_openai(url, cases, folder):
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    options = {
        "model": MODEL,
        "messages": chat(cases["prompt"]),
        "tools": [cases["tool"]],
        "max_tokens": 200,
        "extra_body": cases["extra"],
    }
    reply = client.chat.completions.create(**options)
    assert reply.choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion()
    return calls_of(reply) + calls_of(streamed)


def with_litellm(url, cases, folder):
    import litellm

    options = {
        "model": f"openai/{MODEL}",
        "api_base": f"{url}/v1",
        "api_key": KEY,
        "messages": chat(cases["prompt"]),
        "tools": [cases["tool"]],
        "max_tokens": 200,
        "num_retries": 0,
        "extra_body": cases["extra"],
    }
    reply = litellm.completion(**options)
    chunks = list(litellm.completion(stream=True, **options))
    streamed = litellm.stream_chunk_builder(chunks, messages=chat(cases["prompt"]))
    return calls_of(reply) + calls_of(streamed)


def with_langchain(url, cases, folder):
    from langchain_openai import ChatOpenAI

    options = {"base_url": f"{url}/v1", "api_key": KEY, "max_retries": 0, "extra_body": cases["extra"]}
    model = ChatOpenAI(model=MODEL, max_tokens=200, **options).bind_tools([cases["tool"]])
    reply = model.invoke(cases["prompt"])
    first, *chunks = model.stream(cases["prompt"])
    streamed = first
    for chunk in chunks:
        streamed = streamed + chunk
    calls = [*reply.tool_calls, *streamed.tool_calls]
    return [{"name": call["name"], "arguments": call["args"]} for call in calls]


def with_llm(url, cases, folder):
    os.environ["LLM_USER_PATH"] = folder
    model_of_server = {
        "model_id": MODEL,
        "model_name": MODEL,
        "api_base": f"{url}/v1",
        "api_key_name": "keepsight",
        "supports_tools": True,
    }
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps([model_of_server]))
    import llm

    function = cases["tool"]["function"]
    tool = llm.Tool(function["name"], function["description"], function["parameters"], lambda **_: "warm")
    calls = []
    for stream in (False, True):
        reply = llm.get_model(MODEL).prompt(cases["prompt"], tools=[tool], stream=stream, key=KEY, max_tokens=200)
        for call in reply.tool_calls():
            calls.append({"name": call.name, "arguments": call.arguments})
    return calls


CLIENTS = {
    "openai": with_openai,
    "litellm": with_litellm,
    "langchain-openai": with_langchain,
    "llm": with_llm,
}

if __name__ == "__main__":
    client, url, folder = sys.argv[1:]
    print("\n" + json.dumps(CLIENTS[client](url, json.load(sys.stdin), folder)))
