"""A trivial engine that gives every request the same answer, in the wire format of vLLM.

    python -m benchmarks.gateway.upstream --port 9000

It is a plain ASGI application on uvicorn and parses nothing. As with vLLM, the answer contains
logprobs and token ids only on request. It prints nothing; ``benchmarks.gateway`` starts it.
"""

import argparse
import asyncio
import json
import re

import uvicorn
from starlette.types import Receive, Scope, Send

TOKENS = 16
PROMPT_TOKENS = 200
LONG_TOKENS = 300  # the answer to a request with this ``max_tokens``, and the tokens of its prompt
LONG_PROMPT_TOKENS = 6000
MODEL = "babylon-v0"
_LONG = re.compile(rb'"max_tokens": ?%d\b' % LONG_TOKENS)
_SEED = re.compile(rb'"seed": ?(\d+)')
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream")


def _choice(number: int, tokens: int) -> dict[str, object]:
    last = number == tokens - 1
    delta = {"content": f" word{number}"}
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": "stop" if last else None}


def _score(number: int) -> dict[str, object]:
    token = f" word{number}"
    return {
        "token": token,
        "logprob": -0.5 - number % 16 / 7,
        "bytes": list(token.encode()),
        "top_logprobs": [],
    }


def share_of_delay(seed: int) -> float:
    """Return a request's share of the mean delay, 0.5 to 1.5; it keeps clients out of step."""
    return 0.5 + seed % 1000 / 1000


def whole(exact: bool, tokens: int = TOKENS, prompt_tokens: int = PROMPT_TOKENS) -> bytes:
    """Return a chat completion; ``exact``: with logprobs and token ids."""
    choice: dict[str, object] = {
        "index": 0,
        "message": {"role": "assistant", "content": "".join(f" word{i}" for i in range(tokens))},
        "logprobs": {"content": [_score(i) for i in range(tokens)]} if exact else None,
        "finish_reason": "stop",
    }
    body: dict[str, object] = _head("chat.completion") | {
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        },
    }
    if exact:
        choice["token_ids"] = list(range(1000, 1000 + tokens))
        body["prompt_token_ids"] = list(range(prompt_tokens))
    return json.dumps(body).encode()


def events(exact: bool, tokens: int = TOKENS, prompt_tokens: int = PROMPT_TOKENS) -> list[bytes]:
    """Return the completion as a stream, one event per token."""
    head = _head("chat.completion.chunk")
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    prompt = {"prompt_token_ids": list(range(prompt_tokens))} if exact else {}
    chunks: list[dict[str, object]] = [head | {"choices": [first]} | prompt]
    for number in range(tokens):
        choice = _choice(number, tokens)
        if exact:
            choice |= {"token_ids": [1000 + number], "logprobs": {"content": [_score(number)]}}
        chunks.append(head | {"choices": [choice]})
    if exact:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
        chunks.append(head | {"choices": [], "usage": usage | {"total_tokens": 0}})
    return [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + [
        b"data: [DONE]\n\n"
    ]


def _head(kind: str) -> dict[str, object]:
    return {"id": "chatcmpl-canned", "object": kind, "created": 1, "model": MODEL}


class Upstream:
    """The ASGI application.

    ``PUT /delay/SECONDS`` sets the mean wait before an answer begins. A request's seed determines
    its own wait (see ``share_of_delay``).
    """

    def __init__(self) -> None:
        self._delay_s = 0.0
        self._policies: list[str] = []
        self._whole = {exact: whole(exact) for exact in (False, True)}
        self._events = {exact: events(exact) for exact in (False, True)}
        long = LONG_TOKENS, LONG_PROMPT_TOKENS
        self._long_whole = {exact: whole(exact, *long) for exact in (False, True)}
        self._long_events = {exact: events(exact, *long) for exact in (False, True)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        match scope["method"], scope["path"]:
            case "POST", _:
                if self._delay_s:
                    seed = _SEED.search(body)
                    await asyncio.sleep(self._delay_s * share_of_delay(int(seed[1]) if seed else 0))
                await self._answer(body, send)
            case "PUT", path if path.startswith("/delay/"):
                self._delay_s = float(path.removeprefix("/delay/"))
                await _reply(send, b"{}")
            case "PUT", path:
                self._policies.append(path.removeprefix("/policies/"))
                await _reply(send, json.dumps({"id": self._policies[-1]}).encode())
            case _:
                data = [{"id": name} for name in self._policies]
                await _reply(send, json.dumps({"data": data}).encode())

    async def _answer(self, body: bytes, send: Send) -> None:
        exact, long = b'"return_token_ids":true' in body, bool(_LONG.search(body))
        if b'"stream":true' not in body and b'"stream": true' not in body:
            await _reply(send, (self._long_whole if long else self._whole)[exact])
            return
        await send({"type": "http.response.start", "status": 200, "headers": [_EVENTS]})
        for event in (self._long_events if long else self._events)[exact]:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _reply(send: Send, body: bytes) -> None:
    headers = [_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    uvicorn.run(
        Upstream(),
        port=options.port,
        loop="uvloop",
        lifespan="off",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=75,
    )


if __name__ == "__main__":
    main()
