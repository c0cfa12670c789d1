"""Speed of the embedded engine, compared with transformers' ``generate``.

    python -m benchmarks.engine [--threads N] [--turns 3] [--rounds 1] [--json FILE]

Prints a Markdown table of tokens per second and processor time, then as JSON the latency of a short
answer beside long ones and the memory of adapters. Exits with an error if the engine is slower than
70 % of ``generate`` with 32 clients.

Both use the same prompts, number of new tokens, dtype and threads, in turns: transformers' batched
``generate`` on prepared tokens (left-padded, cached, sampled), and the engine over HTTP. The
engine's clients send requests like the gateway's (logprobs, token ids, usage), each the next one as
soon as the last is answered. Whole answers and streams are measured separately. The policies have
no end-of-sequence token, so every answer has its full length.
"""

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

from babylon.game.market.transcripts import scripted_chats
from babylon.training.base_model import EmbeddedModelRecipe, make_embedded_model
from babylon.training.trainable import DEFAULT_OPTIONS, adapter_targets
from benchmarks.gateway.__main__ import cpu_s, free_ports, memory_mb
from benchmarks.gateway.contenders import until_ready

CLIENTS = (1, 8, 32)
NEW_TOKENS = 64
SHORT, LONG, LONG_ANSWERS, SHORTS = 8, 512, 4, 20
ADAPTERS = 4
AIM = 0.7  # smallest accepted share of generate's tokens per second, at 32 clients
LARGER = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
LARGER |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
Chat = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians over turns.

    ``cpu_ms`` is the sampling process's processor time per thousand tokens. ``ratio`` is the rate
    over plain generate's in the same turn.
    """

    model: str
    clients: int
    how: str
    tokens_per_s: float
    cpu_ms: float
    ratio: float


def save_policies(directory: Path) -> dict[str, Path]:
    """Save two policies: the demo's architecture, and one with 25 million weights."""
    tiny = make_embedded_model(EmbeddedModelRecipe(steps=2), directory)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.eos_token = None
    paths = {}
    for name, changed in {"tiny (96 x 3)": {}, "larger (512 x 8)": LARGER}.items():
        config = AutoConfig.from_pretrained(tiny)
        config.update({**changed, "eos_token_id": None, "layer_types": None})
        torch.manual_seed(0)
        paths[name] = directory / name.split()[0]
        model = Qwen3ForCausalLM(type(config).from_dict(config.to_dict()))
        model.save_pretrained(paths[name])
        tokenizer.save_pretrained(paths[name])
    return paths


class Plain:
    """transformers' ``generate`` in this process."""

    def __init__(self, path: Path) -> None:
        model: Any = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model = model.eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="left")

    def tokens(self, chats: Sequence[Chat]) -> list[list[int]]:
        return [
            self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            for chat in chats
        ]

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]]) -> None:
        """Generate ``NEW_TOKENS`` for each prompt, in one batch."""
        padded = self._tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        output = self._model.generate(
            **padded,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            use_cache=True,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        assert output.shape[1] == padded["input_ids"].shape[1] + NEW_TOKENS


class Engine:
    """The engine's process and its clients."""

    def __init__(self, url: str, pid: int, session: aiohttp.ClientSession) -> None:
        self.url, self.pid, self._session = url, pid, session

    async def load(self, name: str, path: Path) -> None:
        source = {"path": str(path), "version": 0}
        async with self._session.put(f"{self.url}/policies/{name}", json=source) as response:
            assert response.status == 200, await response.text()

    async def unload(self, name: str) -> None:
        async with self._session.delete(f"{self.url}/policies/{name}") as response:
            assert response.status == 204, await response.text()

    async def ask(self, chat: Chat, tokens: int, *, stream: bool) -> None:
        body = {
            "model": "policy",
            "messages": chat,
            "temperature": 1.0,
            "top_p": 1.0,
            "max_tokens": tokens,
            "logprobs": True,
            "return_token_ids": True,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
        async with self._session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            answer = await response.read()
        if response.status != 200 or f'"completion_tokens":{tokens},'.encode() not in answer:
            raise RuntimeError(f"the engine answered {response.status} {answer[-300:]!r}")

    async def ask_all(self, chats: Sequence[Chat], clients: int, *, stream: bool) -> None:
        """Ask for all answers; each client asks for its share, one after the other."""

        async def client(number: int) -> None:
            for chat in chats[number::clients]:
                await self.ask(chat, NEW_TOKENS, stream=stream)

        await asyncio.gather(*map(client, range(clients)))


@asynccontextmanager
async def running_engine(threads: int) -> AsyncIterator[Engine]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "babylon.serving.engine.engine_process", f"--port={port}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        await until_ready(f"{url}/health", process.pid)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Engine(url, process.pid, session)
    finally:
        process.terminate()
        process.wait(timeout=30)


async def throughput(
    model: str, engine: Engine, plain: Plain, chats: Iterator[Chat], *, turns: int, rounds: int
) -> list[Row]:
    """Measure plain, whole and streamed in each turn, with new prompts; the first turn warms up."""
    rows = []
    for clients in CLIENTS:
        tokens = clients * rounds * NEW_TOKENS
        rates: dict[str, list[float]] = {"generate": [], "whole": [], "streamed": []}
        costs: dict[str, list[float]] = {how: [] for how in rates}
        for turn in range(turns + 1):
            asked = list(itertools.islice(chats, clients * rounds))
            prompts = plain.tokens(asked)
            for how in rates:
                pid = os.getpid() if how == "generate" else engine.pid
                cpu, begun = cpu_s(pid), time.perf_counter()
                if how == "generate":
                    for first in range(0, len(prompts), clients):
                        plain.generate(prompts[first : first + clients])
                else:
                    await engine.ask_all(asked, clients, stream=how == "streamed")
                if turn:
                    rates[how].append(tokens / (time.perf_counter() - begun))
                    costs[how].append(1e6 * (cpu_s(pid) - cpu) / tokens)
        rows += [
            Row(
                model=model,
                clients=clients,
                how=how,
                tokens_per_s=median(rates[how]),
                cpu_ms=median(costs[how]),
                ratio=median(
                    ours / theirs
                    for ours, theirs in zip(rates[how], rates["generate"], strict=True)
                ),
            )
            for how in rates
        ]
        print(*map(as_line, rows[-len(rates) :]), sep="\n", flush=True)
    return rows


async def short_beside_long(engine: Engine, chats: Iterator[Chat]) -> dict[str, float]:
    """Return the median ms of a short answer, alone and beside streamed long answers."""

    async def timed() -> float:
        times = []
        for chat in itertools.islice(chats, SHORTS):
            begun = time.perf_counter()
            await engine.ask(chat, SHORT, stream=False)
            times.append(1000 * (time.perf_counter() - begun))
        return median(times)

    async def keep_asking(chat: Chat) -> None:
        while True:
            await engine.ask(chat, LONG, stream=True)

    alone = await timed()
    background = [
        asyncio.create_task(keep_asking(chat)) for chat in itertools.islice(chats, LONG_ANSWERS)
    ]
    await asyncio.sleep(1)
    beside = await timed()
    for task in background:
        if task.done():
            task.result()  # raises: the task ends only by an error
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    return {"alone_ms": alone, "beside_long_ms": beside}


async def adapters_memory(engine: Engine, base: Path, directory: Path) -> dict[str, float]:
    """Return the engine's memory in MB before and after loading adapters, and after unloading."""
    model = Qwen3ForCausalLM.from_pretrained(base)
    targets = sorted(adapter_targets(model, "all"))
    adapted: Any = get_peft_model(model, LoraConfig(r=DEFAULT_OPTIONS.rank, target_modules=targets))
    memory = {
        "weights": sum(weight.nbytes for weight in model.parameters()) / 2**20,
        "before": memory_mb(engine.pid),
    }
    for number in range(ADAPTERS):
        path = directory / f"adapter-{number}"
        adapted.save_pretrained(path)
        AutoTokenizer.from_pretrained(base).save_pretrained(path)
        await engine.load(f"adapter-{number}", path)
    memory["loaded"] = memory_mb(engine.pid)
    for number in range(ADAPTERS):
        await engine.unload(f"adapter-{number}")
    memory["unloaded"] = memory_mb(engine.pid)
    return memory


HEADER = (
    "| model | clients | | tokens/s | by generate's | CPU-ms / 1,000 tokens |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


def as_line(row: Row) -> str:
    """Return the row in Markdown."""
    ratio = "" if row.how == "generate" else f"{row.ratio:.2f}"
    return (
        f"| {row.model} | {row.clients} | {row.how} | {row.tokens_per_s:,.0f} | {ratio}"
        f" | {row.cpu_ms:.0f} |"
    )


async def run(*, threads: int, turns: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    chats = (chat[:-1] for chat in scripted_chats(seed=3))
    report: dict[str, Any] = {"rows": [], "short": {}, "adapters_mb": {}}
    print(HEADER)
    with tempfile.TemporaryDirectory() as temporary:
        for model, path in save_policies(Path(temporary)).items():
            async with running_engine(threads) as engine:
                await engine.load("policy", path)
                plain = Plain(path)
                report["rows"] += await throughput(
                    model, engine, plain, chats, turns=turns, rounds=rounds
                )
                report["short"][model] = await short_beside_long(engine, chats)
                report["adapters_mb"][model] = await adapters_memory(engine, path, Path(temporary))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--threads", type=int, default=psutil.cpu_count() - 1 or 1, help="torch threads"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="answers per client and turn")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args()
    report = asyncio.run(run(threads=options.threads, turns=options.turns, rounds=options.rounds))
    print(json.dumps({"short": report["short"], "adapters_mb": report["adapters_mb"]}, indent=2))
    if options.json:
        plain = report | {"rows": [asdict(row) for row in report["rows"]]}
        options.json.write_text(json.dumps(plain, indent=2))
    slow = [r for r in report["rows"] if r.clients == max(CLIENTS) and r.ratio < AIM]
    if slow:
        sys.exit(f"slower than {AIM:.0%} of generate: {', '.join(map(as_line, slow))}")


if __name__ == "__main__":
    main()
