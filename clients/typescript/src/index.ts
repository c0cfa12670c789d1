/** Records the play of an agent: trajectories, rewards, feedback and outcomes over HTTP. */

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };
export type JsonObject = { [name: string]: Json };

/** A call to a model that was not made through the gateway. */
export interface ElsewhereCall {
  messages: JsonObject[];
  response: string;
  model?: string;
  temperature?: number;
  /** Calls of another purpose than `evaluation` (the default) are trained on. */
  purpose?: "action" | "reasoning" | "evaluation" | "response";
  tool_calls?: JsonObject[];
}

export interface StepAction {
  action_type?: string;
  success?: boolean;
  parameters?: JsonObject;
  result?: Json;
  error?: string;
  reasoning?: string;
  correctness?: JsonObject;
}

export interface StartFields {
  agent_id?: string;
  /** Trajectories of one scenario are compared with each other. Default: the window. */
  scenario_id?: string;
  /** Time as ISO 8601 with a zone. Default: the time of arrival. */
  at?: string;
}

export interface StepFields {
  /** Ids of the gateway's answers, in order. */
  calls?: (string | ElsewhereCall)[];
  /** The game's own. Only `agentPnL` (US dollars, lifetime) is read: in all steps or in none. */
  state?: JsonObject;
  action?: StepAction;
  reward?: number;
  at?: string;
}

export interface FinishFields {
  reward?: number;
  status?: string;
  final_balance?: number;
  final_pnl?: number;
  /** Ground truth, which only the judge sees. */
  knowledge?: JsonObject;
  at?: string;
}

export interface FeedbackFields {
  /** Default: `reward`, which the scorer `feedback` adds up. Other names are metrics. */
  name?: string;
  step?: number;
  call_id?: string;
  value?: number;
  label?: string;
  comment?: string;
}

type About = { trajectory_id: string };
export type PlayEvent =
  | ({ type: "start" } & About & StartFields)
  | ({ type: "step"; number: number } & About & StepFields)
  | ({ type: "finish" } & About & FinishFields)
  | ({ type: "feedback"; trajectory_id?: string } & FeedbackFields)
  | { type: "price"; ticker: string; price_usd: number; at?: string }
  | { type: "probability"; market_id: string; question: string; yes: number; at?: string }
  | { type: "resolution"; market_id: string; question: string; outcome: "YES" | "NO"; at?: string }
  | { type: "outcomes"; window_id: string };

/** The fate of one event. `status` is an HTTP status: 200, or why it was refused. */
export interface EventResult {
  status: number;
  code: string | null;
  error: string | null;
  trajectory_id: string | null;
  repeated: boolean;
  window_id: string | null;
  late: boolean;
  calls: number | null;
  /** Of a finish: calls in the row that a rule or a full disk kept out of the records. */
  unrecorded: number | null;
}

/** The gateway refused an event. `results` has the fate of each event that was sent. */
export class PlayRefusedError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly results: EventResult[],
  ) {
    super(message);
    this.name = "PlayRefusedError";
  }
}

const PAUSES_MS = [100, 500, 2000, 5000]; // before each repetition
const TIMEOUT_MS = 60_000;
const AGAIN = new Set([429, 502, 503, 504]);

/** Sends events to a gateway. `endpoint` is its address, without a path. */
export class PlayClient {
  readonly #url: string;
  readonly #key: string;

  constructor(endpoint: string, key: string) {
    this.#url = `${endpoint.replace(/\/+$/, "")}/v1/events`;
    this.#key = key;
  }

  /**
   * Starts a trajectory, passes it to `body`, and finishes it when `body` ends well. If `body`
   * throws, the trajectory stays unfinished and is never trained.
   */
  async play<T>(
    about: StartFields & { trajectory_id?: string },
    body: (play: TrajectoryPlay) => Promise<T>,
  ): Promise<T> {
    const { trajectory_id = crypto.randomUUID(), ...fields } = about;
    await this.send({ type: "start", trajectory_id, ...fields });
    const play = new TrajectoryPlay(this, trajectory_id, about.agent_id);
    const value = await body(play);
    if (!play.finished) await play.finish();
    return value;
  }

  /** Sends up to 200 events. Throws a `PlayRefusedError` if one is refused; the others are stored. */
  async send(...events: PlayEvent[]): Promise<EventResult[]> {
    const body = JSON.stringify({ events }, finite);
    for (const pause of PAUSES_MS) {
      let asked = 0; // by a gateway, if the key has reached its limit of requests
      try {
        const answer = await this.#post(body);
        if (!AGAIN.has(answer.status)) return await read(answer);
        if (answer.status === 429) asked = 1000 * Number(answer.headers.get("retry-after"));
        await answer.body?.cancel(); // an unread body would hold its connection
      } catch (error) {
        if (error instanceof PlayRefusedError) throw error;
      }
      await new Promise((done) => setTimeout(done, Math.max(pause, asked || 0)));
    }
    return await read(await this.#post(body));
  }

  #post(body: string): Promise<Response> {
    return fetch(this.#url, {
      method: "POST",
      headers: { authorization: `Bearer ${this.#key}`, "content-type": "application/json" },
      body,
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
  }
}

/** A trajectory that is being recorded. */
export class TrajectoryPlay {
  nextStep = 0;
  finished = false;

  constructor(
    private readonly client: PlayClient,
    readonly trajectoryId: string,
    private readonly agentId?: string,
  ) {}

  /** The headers that tie a call to the next step of this trajectory. */
  get headers(): Record<string, string> {
    return {
      ...(this.agentId === undefined ? {} : { "x-babylon-agent": ascii(this.agentId) }),
      "x-babylon-trajectory": ascii(this.trajectoryId),
      "x-babylon-step": String(this.nextStep),
    };
  }

  /** Adds a step and returns its number. */
  async step(fields: StepFields = {}): Promise<number> {
    const number = this.nextStep;
    await this.client.send({ type: "step", trajectory_id: this.trajectoryId, number, ...fields });
    this.nextStep = number + 1;
    return number;
  }

  /** Gives feedback for the trajectory, one of its steps or one of its calls. */
  async feedback(fields: FeedbackFields): Promise<void> {
    await this.client.send({ type: "feedback", trajectory_id: this.trajectoryId, ...fields });
  }

  /** Ends the trajectory. */
  async finish(fields: FinishFields = {}): Promise<void> {
    await this.client.send({ type: "finish", trajectory_id: this.trajectoryId, ...fields });
    this.finished = true;
  }
}

/**
 * A header's value as it is, or percent-encoded (RFC 8187): headers are ASCII, and blanks at the ends
 * are lost on the way.
 */
function ascii(value: string): string {
  const plain = /^[ -~]*$/.test(value) && value === value.trim();
  return plain ? value : `utf-8''${encodeURIComponent(value)}`;
}

/** Refuses NaN and infinity: JSON writes null for them, and a reward of null is none. */
function finite(name: string, value: unknown): unknown {
  if (typeof value === "number" && !Number.isFinite(value)) {
    throw new TypeError(`${name} is ${value}: send a finite number`);
  }
  return value;
}

async function read(answer: Response): Promise<EventResult[]> {
  const text = await answer.text();
  let body: { results?: EventResult[]; error?: { message: string } } | null = null;
  try {
    body = JSON.parse(text);
  } catch {
    // no JSON: the same as JSON of another server
  }
  if (body?.error) {
    throw new PlayRefusedError(body.error.message, answer.status, body.results ?? []);
  }
  if (!Array.isArray(body?.results)) {
    const why = `status ${answer.status}, no answer of a gateway: is the endpoint its address?`;
    throw new PlayRefusedError(why, answer.status, []);
  }
  return body.results;
}
