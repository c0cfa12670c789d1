/** An agent in TypeScript: `node agent.js ENDPOINT KEY` plays one trajectory and prints its id. */
import { PlayClient, PlayRefusedError } from "babylon-rl";

declare const process: { argv: string[] };
const [endpoint = "", key = ""] = process.argv.slice(2);

const client = new PlayClient(endpoint, key);
const name = await client.play({ agent_id: "typescript", scenario_id: "prices" }, async (play) => {
  for (let tick = 0; tick < 3; tick++) {
    const answer = await fetch(`${endpoint}/v1/chat/completions`, {
      method: "POST",
      headers: {
        authorization: `Bearer ${key}`,
        "content-type": "application/json",
        ...play.headers,
      },
      body: JSON.stringify({
        model: "babylon",
        max_tokens: 8,
        messages: [{ role: "user", content: `Tick ${tick}. Trade?` }],
      }),
    });
    const { id } = (await answer.json()) as { id: string };
    await play.step({ calls: [id], state: { tick }, reward: tick });
  }
  await play.feedback({ name: "tone", value: 0.5, comment: "polite" });
  return play.trajectoryId;
});

try {
  await client.send({ type: "finish", trajectory_id: "nobody's" });
} catch (error) {
  if (!(error instanceof PlayRefusedError) || error.status !== 404) throw error;
}
console.log(name);
