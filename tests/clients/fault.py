"""Does with one real client what servers refuse, and what goes wrong; runs in the environment of `make setup-clients`.

    python fault.py CLIENT URL OPEN_URL < CASES

The server at URL needs the key `any`; that at OPEN_URL, which may be empty, needs none. CASES is {"short": TEXT,
"long": TEXT of several pages, "too_long": TEXT beyond the context, "too_large": TEXT beyond the largest body,
"tokens": N, "patience": SECONDS}. Prints a JSON list of {"what", "error", "status", "text"}; `error` is the class of
the client's exception, empty for an answer. `deploy` in place of a client prints `running` once an answer runs and
others wait, "queue": [TEXT, ...] of CASES among them, and then waits for the server's end.
"""

import asyncio
import json
import sys

MODEL = "tiny"
KEY = "any"


def chat(prompt):
    return [{"role": "user", "content": prompt}]


def outcome(what, call):
    """What a call ends in."""
    try:
        text = call()
    except Exception as error:
        status = getattr(error, "status_code", None)
        return {"what": what, "error": type(error).__name__, "status": status, "text": str(error)}
    return {"what": what, "error": "", "status": 200, "text": text}


def openai_client(url, key=KEY, **options):
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, **options)


def with_openai(url, open_url, cases):
    options = {"model": MODEL, "max_tokens": cases["tokens"], "temperature": 0}

    def complete(client, prompt, **fields):
        return client.completions.create(prompt=prompt, **options, **fields).choices[0].text

    def demand_call(client):
        tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
        tool_choice = {"type": "function", "function": {"name": "weather"}}
        fields = {"messages": chat(cases["short"]), "tools": [tool], "tool_choice": tool_choice}
        return client.chat.completions.create(**options, **fields).choices[0].message.content

    locked = openai_client(url)
    outcomes = [
        outcome("wrong key", lambda: complete(openai_client(url, "other"), cases["short"])),
        outcome("models without the key", lambda: openai_client(url, "other").models.list().data[0].id),
        outcome("text/plain", lambda: complete(locked, cases["short"], extra_headers={"Content-Type": "text/plain"})),
        outcome("too long", lambda: complete(locked, cases["too_long"])),
        outcome("too large", lambda: complete(locked, cases["too_large"])),
    ]
    if open_url:
        outcomes.append(outcome("a demanded call", lambda: demand_call(locked)))
        for what, headers in (("Host", {"Host": "evil.example"}), ("Origin", {"Origin": "http://evil.example"})):
            client = openai_client(open_url, default_headers=headers)
            outcomes.append(outcome(what, lambda client=client: complete(client, cases["short"])))

    impatient = openai_client(url, timeout=cases["patience"])
    outcomes.append(outcome("leaves in a prefill", lambda: complete(impatient, cases["long"])))

    async def cancelled():
        import openai

        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        call = asyncio.ensure_future(client.completions.create(prompt=cases["long"] + "?", **options))
        await asyncio.sleep(cases["patience"])
        call.cancel()
        try:
            await call
        except asyncio.CancelledError:
            raise TimeoutError("cancelled") from None

    outcomes.append(outcome("a task that is cancelled", lambda: asyncio.run(cancelled())))
    outcomes.append(outcome("afterwards", lambda: complete(locked, cases["short"])))
    return outcomes


def with_litellm(url, open_url, cases):
    import litellm

    def complete(prompt, api_base, key=KEY, **options):
        reply = litellm.completion(
            model=f"openai/{MODEL}",
            messages=chat(prompt),
            api_base=f"{api_base}/v1",
            api_key=key,
            max_tokens=cases["tokens"],
            temperature=0,
            num_retries=0,
            **options,
        )
        return reply.choices[0].message.content

    outcomes = [
        outcome("wrong key", lambda: complete(cases["short"], url, "other")),
        outcome("too long", lambda: complete(cases["too_long"], url)),
        outcome("too large", lambda: complete(cases["too_large"], url)),
    ]
    if open_url:
        headers = {"Origin": "http://evil.example"}
        outcomes.append(outcome("Origin", lambda: complete(cases["short"], open_url, extra_headers=headers)))
    outcomes.append(outcome("afterwards", lambda: complete(cases["short"], url)))
    return outcomes


def with_langchain(url, open_url, cases):
    from langchain_openai import ChatOpenAI

    def complete(prompt, key=KEY):
        options = {"model": MODEL, "base_url": f"{url}/v1", "api_key": key, "temperature": 0, "max_retries": 0}
        return ChatOpenAI(max_tokens=cases["tokens"], **options).invoke(prompt).content

    return [
        outcome("wrong key", lambda: complete(cases["short"], "other")),
        outcome("too long", lambda: complete(cases["too_long"])),
        outcome("too large", lambda: complete(cases["too_large"])),
        outcome("afterwards", lambda: complete(cases["short"])),
    ]


def until_the_end(url, open_url, cases):
    """An answer that runs, and three requests that wait, while the server is told to stop."""
    import openai

    options = {"model": MODEL, "temperature": 0}
    started = asyncio.Event()

    async def run():
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120)

        async def running():
            reason = None
            fields = options | {"prompt": cases["short"], "max_tokens": cases["tokens"], "stream": True}
            async for chunk in await client.completions.create(**fields, extra_body={"ignore_eos": True}):
                started.set()
                reason = chunk.choices[0].finish_reason or reason
            return reason

        async def unstreamed():
            reply = await client.chat.completions.create(messages=chat(cases["short"]), **options)
            return reply.choices[0].message.content

        async def stream():
            fields = options | {"prompt": cases["short"], "max_tokens": 8, "stream": True}
            text = ""
            async for chunk in await client.completions.create(**fields):
                text += chunk.choices[0].text
            return text

        async def queued(prompt):
            reply = await client.completions.create(prompt=prompt, max_tokens=2, **options)
            return reply.choices[0].finish_reason

        calls = {"running": asyncio.ensure_future(running())}
        await started.wait()
        calls["unstreamed"] = asyncio.ensure_future(unstreamed())
        calls["stream"] = asyncio.ensure_future(stream())
        for number, prompt in enumerate(cases.get("queue", ())):
            calls[f"queued {number}"] = asyncio.ensure_future(queued(prompt))
        await asyncio.sleep(cases["patience"])
        print("running", flush=True)
        results = await asyncio.gather(*calls.values(), return_exceptions=True)
        return dict(zip(calls, results, strict=True))

    outcomes = []
    for what, result in asyncio.run(run()).items():

        def result_or_raise(result=result):
            if isinstance(result, BaseException):
                raise result
            return result

        outcomes.append(outcome(what, result_or_raise))
    return outcomes


CLIENTS = {
    "openai": with_openai,
    "litellm": with_litellm,
    "langchain-openai": with_langchain,
    "deploy": until_the_end,
}

if __name__ == "__main__":
    client, url, open_url = sys.argv[1:]
    print("\n" + json.dumps(CLIENTS[client](url, open_url, json.load(sys.stdin))))
