"""Probes of a vLLM server: does it run with what exact recording and tools need?

``VLLM_ENFORCE_STRICT_TOOL_CALLING`` cannot be found out over HTTP.
"""

from babylon.core.errors import ServingError
from babylon.serving.openai_wire import JsonObject, RequestError
from babylon.serving.vllm.vllm_client import VllmClient

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_HOT, _COLD = 2.0, 0.5
_SAME, _NOISE = 1e-6, 0.05  # nats: of one number, and of two forward passes in half precision


async def exactness_problems(vllm: VllmClient, model: str) -> list[str]:
    """Return what is missing, with the remedy.

    Raises:
        VllmDownError, TimeoutError: the server does not answer.
        RequestError: the server refuses a plain chat.
        ServingError: it answers without logprobs.
    """
    cold = await _likeliest(vllm, model, {"temperature": _COLD, **_NEUTRAL})
    hot = await _likeliest(vllm, model, {"temperature": _HOT, **_NEUTRAL})
    usual = await _likeliest(vllm, model, {"temperature": _HOT})
    problems = []
    if abs(cold - hot) < _SAME:
        problems.append("logprobs ignore the temperature: --logprobs-mode processed_logprobs")
    elif abs(usual - hot) > _NOISE:
        problems.append("the model's own sampling defaults are in force: --generation-config vllm")
    try:
        await vllm.chat({**_chat(model), "tools": [_TOOL], "tool_choice": "auto"})
    except RequestError as error:
        problems.append(f"tools: --enable-auto-tool-choice --tool-call-parser NAME ({error})")
    return problems


async def _likeliest(vllm: VllmClient, model: str, sampling: JsonObject) -> float:
    """Return the logprob of the likeliest first token."""
    asked = {"logprobs": True, "top_logprobs": 1, "top_p": 1.0, **sampling}
    answer = await vllm.chat({**_chat(model), **asked})
    try:
        return float(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["logprob"])
    except (KeyError, IndexError, TypeError) as error:
        raise ServingError(
            f"{vllm.url} answers without logprobs, which exact recording needs: let ENGINE_URL name"
            " a vLLM server, and no proxy that leaves them out"
        ) from error


def _chat(model: str) -> JsonObject:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": model, "messages": messages, "max_tokens": 1}
