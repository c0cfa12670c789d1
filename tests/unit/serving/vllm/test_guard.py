import httpx
import pytest

from babylon.serving.gateway.asgi import Receive, Response, Scope, Send
from babylon.serving.vllm.guard.babylon_guard import NeedsKey


async def vllm(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(send).whole(b"sampled")


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/invocations", None, 401),  # vLLM asks for no key there
        ("/adapters", "Bearer other", 401),
        ("/v1/chat/completions", "k", 401),
        ("/invocations", "Bearer k", 200),
        ("/health", None, 200),
        ("/metrics", None, 200),
    ],
)
async def test_vllm_answers_only_with_the_key(
    path: str, key: str | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k")
    transport = httpx.ASGITransport(NeedsKey(vllm))
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
        answer = await client.post(path, headers={"authorization": key} if key else {})
    assert answer.status_code == status
    assert (answer.text == "sampled") == (status == 200)
