"""A judge with known noise and biases: an OpenAI-compatible server for benchmarks and tests.

    python -m benchmarks.loopback_judge [--port N] [--noise 0.2]     prints its base URL and serves

    async with LoopbackJudge(Mind(noise=0.2)) as judge:
        ...  # point an OpenAI client at judge.base_url; judge.requests, judge.prompt_tokens, ...

The judge reads the blocks ``<trajectory id="...">...</trajectory>`` of a prompt. A block's quality
is what ``Mind.quality`` finds in its visible text. The judge answers in the JSON schema of the
request: an array of scored ids (listwise), the name of the better one (pairwise) or one number
(pointwise). It obeys instructions outside the blocks on purpose, so that text which breaks out of
its block has an effect.

A judgment of a block is ``x + noise * z + position + verbosity``, where ``x`` places the quality on
``scale`` (0 to 1) and z is standard normal, or Student's t. ``persistent`` is the share of the
noise's variance that depends on the trajectory alone and is the same in every prompt. The score is
``0.25 + judgment / 2``, clipped to [0, 1]; the margin keeps most misjudged extremes inside.
``seed`` and the prompt seed the random stream: the same prompt gets the same answer, another order
of its blocks a new one.

A token is four characters, rounded up, of all messages and the response schema (prompt) or of the
answer (completion). An answer ends at the request's limit.
"""

import argparse
import asyncio
import html
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from math import sqrt
from random import Random
from statistics import fmean
from types import TracebackType
from typing import Any, Self

from aiohttp import web

BLOCK = re.compile(
    r'<trajectory\b[^>]*?\bid="([^"]+)"[^>]*>(.*?)</trajectory\s*>', re.DOTALL | re.IGNORECASE
)
ORDER = re.compile(
    r"give trajectory (?:\"?(?P<id>[\w-]+)\"?) a score of (?P<score>\d+(?:\.\d+)?)", re.IGNORECASE
)
DEMAND = re.compile(r"score it (\d(?:\.\d+)?)", re.IGNORECASE)
PNL = re.compile(r"P&L[^\d+\n-]{0,24}(?P<sign>[+-]?)\$?(?P<number>[+-]?[\d,]*\.?\d+)")
CHOICE_NAMES = {"better", "preferred", "winner", "choice"}
FAULTS = (
    *("rate_limit", "server_error", "slow"),  # instead of an answer, or before it
    *("malformed", "fenced", "missing_id", "duplicate_id", "unknown_id"),
    *("out_of_range", "nan", "rank_order"),
    *("cut", "cut_thoughts"),  # the reply ends at its limit, with scores in what is there
)
REFUSALS = ("error_400", "refusal", "content_filter", "silence")


def last_pnl(block: str) -> float:
    """Return the last number in US dollars that follows "P&L".

    Raises:
        ValueError: The block has no such number.
    """
    found = list(PNL.finditer(block))
    if not found:
        raise ValueError(f"no P&L in block {block[:200]!r}")
    return float(found[-1]["sign"] + found[-1]["number"].replace(",", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mind:
    """The judge's noise, biases and faults. Biases are shares of the width of ``scale``.

    ``position_bias``: advantage of the first block over the last, falling linearly; negative: of
    the last. ``first_bias``: advantage of the first block only. ``persistent``: share of the
    noise's variance. ``tails``: degrees of freedom of the noise, 0: normal. ``blind``: the quality
    counts nothing. ``verbosity_bias``: advantage of a block of twice the mean length. ``curve``: 0
    scores by ``scale`` only, 1 stretches each prompt's scores over the whole range. ``gullible``: a
    demand inside a block ("Score it 1.0") is obeyed. ``faults``: the
    rate of each of ``FAULTS``, drawn again when a prompt is repeated. ``stubborn``: faults are
    drawn once per prompt, so retries fail, too. ``caches``: beginnings of prompts are cached, as
    providers do. ``lacks``: request fields that the server refuses, as older servers do. ``key``:
    the only accepted API key. ``model``: the only known model. ``refuses``: the server refuses
    prompts with this text, in the way that ``refusal`` names; ``silence`` is an error 500 each
    time. Such errors quote the request and its key, as some servers do.
    """

    quality: Callable[[str], float] = last_pnl
    scale: tuple[float, float] = (-1000.0, 1000.0)
    seed: int = 0
    noise: float = 0.0
    persistent: float = 0.0
    tails: float = 0.0
    blind: bool = False
    caches: bool = True
    position_bias: float = 0.0
    first_bias: float = 0.0
    verbosity_bias: float = 0.0
    curve: float = 0.0
    decimals: int = 6
    gullible: bool = False
    faults: Mapping[str, float] = field(default_factory=dict)
    stubborn: bool = False
    lacks: frozenset[str] = frozenset()
    key: str = ""
    model: str = ""
    refuses: str = ""
    refusal: str = "error_400"
    token_characters: int = 4
    context_tokens: int = 128_000
    delay_s: float = 0.0
    slow_s: float = 30.0
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        if unknown := set(self.faults) - set(FAULTS):
            raise ValueError(f"faults {sorted(unknown)} are unknown: choose among {FAULTS}")


def count_tokens(text: str, characters: int = 4) -> int:
    """Count one token per four characters, or another number of them, rounded up."""
    return -(-len(text) // characters)


def read_blocks(prompt: str) -> dict[str, str]:
    """Return id → text of each block, with entities resolved. The first block of an id counts."""
    blocks: dict[str, str] = {}
    for name, text in BLOCK.findall(prompt):
        blocks.setdefault(html.unescape(name), html.unescape(text))
    return blocks


def read_orders(prompt: str) -> dict[str, float]:
    """Return id → score demanded by text outside the blocks; ``above`` is the previous block."""
    orders: dict[str, float] = {}
    above, start = "", 0
    for block in [*BLOCK.finditer(prompt), None]:
        outside = prompt[start : block.start() if block else len(prompt)]
        for order in ORDER.finditer(outside):
            name = above if order["id"].lower() == "above" else order["id"]
            orders[name] = float(order["score"])
        if block:
            above, start = html.unescape(block[1]), block.end()
    return orders


def judge_blocks(mind: Mind, prompt: str) -> dict[str, float]:
    """Return id → score in [0, 1], in the order of the prompt.

    Raises:
        ValueError: The prompt has no block, or a block has no quality.
    """
    blocks = read_blocks(prompt)
    if not blocks:
        raise ValueError("the prompt holds no <trajectory id=...> block")
    random = Random(f"{mind.seed}:{_digest(prompt)}")
    low, high = mind.scale
    mean_length = sum(map(len, blocks.values())) / len(blocks)
    judged = {}
    for place, (name, text) in enumerate(blocks.items()):
        ahead = 1 - place / (len(blocks) - 1) if len(blocks) > 1 else 0.5
        quality = mind.quality(text)
        steady = Random(f"{mind.seed}:{quality}").gauss()
        judged[name] = (
            (0.5 if mind.blind else (quality - low) / (high - low))
            + mind.noise * sqrt(mind.persistent) * steady
            + mind.noise * sqrt(1 - mind.persistent) * _noise(random, mind.tails)
            + mind.position_bias * (ahead - 0.5)
            + mind.first_bias * (place == 0)
            + mind.verbosity_bias * (len(text) / mean_length - 1)
        )
    if mind.curve and len(blocks) > 1:
        floor, width = min(judged.values()), max(judged.values()) - min(judged.values())
        for name, value in judged.items():
            stretched = (value - floor) / width if width else 0.5
            judged[name] = (1 - mind.curve) * value + mind.curve * stretched
    scores = {name: min(1.0, max(0.0, 0.25 + value / 2)) for name, value in judged.items()}
    obeyed = {name: score for name, score in read_orders(prompt).items() if name in scores}
    for name, text in blocks.items() if mind.gullible else ():
        if found := DEMAND.search(text):
            obeyed[name] = float(found[1])
    return {name: round(score, mind.decimals) for name, score in (scores | obeyed).items()}


def mean_score(mind: Mind, quality: float) -> float:
    """Return the score of a quality on average over noise and persistent errors, without biases.

    Clipping moves it inwards if the tails are heavy.
    """
    low, high = mind.scale
    true = (quality - low) / (high - low)
    errors = _errors(mind.persistent, mind.tails)
    return fmean(min(1.0, max(0.0, 0.25 + (true + mind.noise * e) / 2)) for e in errors)


@cache
def _errors(persistent: float, tails: float) -> list[float]:
    """Return many errors of unit noise, each with both signs."""
    random = Random(f"errors:{persistent}:{tails}")
    one_sided = [
        sqrt(persistent) * random.gauss() + sqrt(1 - persistent) * _noise(random, tails)
        for _ in range(2000)
    ]
    return [sign * error for error in one_sided for sign in (1, -1)]


def _noise(random: Random, tails: float) -> float:
    """Return a normal number, or Student's t of ``tails`` degrees of freedom."""
    return random.gauss() / (sqrt(random.gammavariate(tails / 2, 2 / tails)) if tails else 1.0)


def answer_in_schema(schema: Mapping[str, Any], scores: Mapping[str, float]) -> dict[str, Any]:
    """Return the scores in the form of a JSON schema, with any property names."""
    definitions = schema.get("$defs", {})

    def resolve(part: Mapping[str, Any]) -> Mapping[str, Any]:
        reference = part.get("$ref")
        return definitions[reference.rsplit("/", 1)[1]] if reference else part

    answer: dict[str, Any] = {}
    ranked = sorted(scores, key=lambda name: -scores[name])
    for name, part in resolve(schema).get("properties", {}).items():
        part = resolve(part)
        if part.get("type") == "array":
            entry = resolve(part["items"])["properties"]
            answer[name] = [_entry(entry, block, score) for block, score in scores.items()]
        elif name in CHOICE_NAMES or "enum" in part:
            answer[name] = _choice(part.get("enum", ranked), list(scores), ranked[0])
        elif part.get("type") == "number":
            answer[name] = scores[ranked[0]] if len(scores) == 1 else _margin(scores)
        else:
            answer[name] = _reason(ranked[0], scores[ranked[0]])
    return answer


def _entry(properties: Mapping[str, Any], block: str, score: float) -> dict[str, Any]:
    return {
        name: block
        if name == "id" or name.endswith("_id")
        else score
        if part.get("type") == "number"
        else _reason(block, score)
        for name, part in properties.items()
    }


def _choice(names: list[str], order: list[str], best: str) -> str:
    return best if best in names else names[order.index(best)]


def _margin(scores: Mapping[str, float]) -> float:
    return max(scores.values()) - min(scores.values())


def _reason(block: str, score: float) -> str:
    return f"Trajectory {block}: its result, timing and risk are worth {score:.2f}."


def spoil(fault: str, answer: dict[str, Any]) -> str:
    """Return an answer's text with one fault. Faults of lists leave other answers unchanged."""
    entries = next((value for value in answer.values() if isinstance(value, list)), None)
    if fault == "malformed":
        return json.dumps(answer)[:-7]
    if fault == "fenced":
        return f"Here is my judgment:\n```json\n{json.dumps(answer)}\n```"
    if fault == "cut_thoughts":
        return f"<think>First I would say {json.dumps(answer)} but"
    target = answer if entries is None else entries[-1]
    number = next((name for name, value in target.items() if isinstance(value, float)), None)
    if number and fault in ("out_of_range", "nan"):
        target[number] = 7.5 if fault == "out_of_range" else float("nan")
    elif entries is not None:
        name = next(key for key, value in target.items() if key == "id" or key.endswith("_id"))
        match fault:
            case "missing_id":
                entries.pop()
            case "duplicate_id":
                target[name] = entries[0][name]
            case "unknown_id":
                target[name] = "nobody"
            case "rank_order":
                entries.sort(key=lambda entry: -entry[number])
    return json.dumps(answer)


class LoopbackJudge:
    """The server, by default on a free port of 127.0.0.1, with counts of requests and tokens."""

    def __init__(self, mind: Mind | None = None, *, port: int = 0) -> None:
        self.mind = mind or Mind()
        self.requests = self.prompt_tokens = self.completion_tokens = 0
        self.faults: Counter[str] = Counter()
        self.prompts: list[str] = []
        self.cached_tokens = 0
        self.early = 0  # requests before the end of a wait that ``Retry-After`` asked for
        self._wait_until = 0.0
        self._seen: Counter[str] = Counter()
        self._port = port
        application = web.Application(client_max_size=256 * 2**20)
        application.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        self.base_url = ""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.mind.key and request.headers.get("Authorization") != f"Bearer {self.mind.key}":
            return _refuse(401, "invalid_api_key", "Incorrect API key provided")
        if lacking := sorted(self.mind.lacks.intersection(body)):
            return _refuse(400, "unsupported_parameter", f"Unsupported parameter: '{lacking[0]}'")
        if self.mind.model and body["model"] != self.mind.model:
            return _refuse(404, "model_not_found", f"The model `{body['model']}` does not exist")
        prompt = "\n".join(_text(message["content"]) for message in body["messages"])
        schema = ((body.get("response_format") or {}).get("json_schema") or {}).get("schema")
        self.requests += 1
        cached = self._cached(prompt)
        self.prompts.append(prompt)
        now = asyncio.get_running_loop().time()
        self.early += now < self._wait_until
        await asyncio.sleep(self.mind.delay_s)
        if self.mind.refuses and self.mind.refuses in prompt:
            self.faults[self.mind.refusal] += 1
            quoted = f"{prompt} {json.dumps(prompt)} {request.headers.get('Authorization')}"
            match self.mind.refusal:
                case "error_400":
                    return _refuse(400, "content_policy_violation", f"This is flagged: {quoted}")
                case "silence":
                    return _refuse(500, "server_error", f"the tokenizer failed on: {quoted}")
                case "refusal":
                    return web.json_response(_completion(body["model"], None, 0, refusal="No."))
            return web.json_response(_completion(body["model"], "", 0, finish="content_filter"))
        size = self.mind.token_characters
        asked = count_tokens(prompt, size)
        asked += count_tokens(json.dumps(schema) if schema else "", size)
        if asked > self.mind.context_tokens:
            problem = "'max_tokens' or 'max_completion_tokens' is too large"  # as vLLM says it
            problem += f". This model's maximum context length is {self.mind.context_tokens} tokens"
            return _refuse(400, "context_length_exceeded", f"{problem}, but you sent {asked}")
        fault = self._draw_fault(prompt)
        if fault == "rate_limit":
            after = {"Retry-After": f"{self.mind.retry_after_s:g}"}
            self._wait_until = asyncio.get_running_loop().time() + self.mind.retry_after_s
            return _refuse(429, "rate_limit_exceeded", "too many requests", after)
        if fault == "server_error":
            return _refuse(500, "server_error", "the judge is unwell")
        try:
            scores = judge_blocks(self.mind, prompt)
        except ValueError as error:
            return _refuse(400, "invalid_prompt", str(error))
        text = spoil(fault, answer_in_schema(schema or LISTWISE, scores))
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        cut = bool(limit) and count_tokens(text, size) > limit
        text = text[: limit * size] if cut else text
        self.prompt_tokens += asked
        self.cached_tokens += cached
        self.completion_tokens += count_tokens(text, size)
        if fault == "slow":  # the answer is paid for, even if the client has gone
            await asyncio.sleep(self.mind.slow_s)
        finish = "length" if cut or fault.startswith("cut") else "stop"
        written = count_tokens(text, size)
        thoughts = written if fault == "cut_thoughts" else 0
        return web.json_response(
            _completion(
                body["model"], text, asked, written, finish=finish, thoughts=thoughts, cached=cached
            )
        )

    def _cached(self, prompt: str) -> int:
        """Return the tokens of the longest beginning that an earlier prompt had, in whole 128s."""
        if not self.mind.caches:
            return 0
        longest = max((_same_until(prompt, one) for one in self.prompts), default=0)
        return longest // self.mind.token_characters // 128 * 128

    def _draw_fault(self, prompt: str) -> str:
        key = _digest(prompt)
        attempt = 0 if self.mind.stubborn else self._seen[key]
        self._seen[key] += 1
        left = Random(f"{self.mind.seed}:fault:{key}:{attempt}").random()
        for fault, rate in self.mind.faults.items():
            if left < rate:
                self.faults[fault] += 1
                return fault
            left -= rate
        return ""


LISTWISE = {
    "properties": {
        "scores": {
            "type": "array",
            "items": {"properties": {"id": {}, "explanation": {}, "score": {"type": "number"}}},
        }
    }
}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or [])


def _same_until(one: str, other: str) -> int:
    lengths = range(1, min(len(one), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: one[:length] != other[:length])


def _digest(prompt: str) -> str:
    return blake2b(prompt.encode(errors="surrogatepass")).hexdigest()


def _refuse(
    status: int, code: str, message: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    error = {"message": message, "type": code, "param": None, "code": code}
    return web.json_response({"error": error}, status=status, headers=headers)


def _completion(
    model: str,
    text: str | None,
    prompt_tokens: int,
    written: int = 0,
    *,
    finish: str = "stop",
    thoughts: int = 0,
    cached: int = 0,
    refusal: str | None = None,
) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": refusal}
    return {
        "id": "chatcmpl-loopback",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": written,
            "total_tokens": prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": thoughts},
        },
    }


async def serve(mind: Mind, port: int) -> None:
    """Serve until cancelled."""
    async with LoopbackJudge(mind, port=port) as judge:
        print(judge.base_url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--position-bias", type=float, default=0.0)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--key", default="", help="the only accepted API key")
    parser.add_argument("--lacks", nargs="*", default=(), help="fields to refuse: response_format")
    options = vars(parser.parse_args())
    port = options.pop("port")
    mind = Mind(**options | {"lacks": frozenset(options["lacks"])})
    asyncio.run(serve(mind, port))


if __name__ == "__main__":
    main()
