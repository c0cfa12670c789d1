"""The first program of README.md: an agent plays one trajectory through the gateway."""

from openai import OpenAI

from babylon import PlayClient, load_settings

settings = load_settings()
endpoint = settings.serving.endpoint
key = (settings.home.root / "local.key").read_text().strip()
policy = OpenAI(base_url=f"{endpoint}/v1", api_key=key)

with PlayClient(endpoint, key) as client, client.trajectory("agent-7") as play:
    for step in range(5):
        answer = policy.chat.completions.create(
            model="babylon",
            messages=[{"role": "user", "content": f"Step {step}. YES costs 0.40. Trade?"}],
            max_tokens=64,
            extra_headers=play.headers,
        )
        play.step(calls=[answer.id], reward=float(len(answer.choices[0].message.content or "")))
print(f"recorded {play.trajectory_id}")
