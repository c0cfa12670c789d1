-- The schema babylon. It does not refer to the game's tables, so it can be in a foreign database.

CREATE TABLE babylon.windows (
    window_id     text PRIMARY KEY,
    minutes       integer NOT NULL,
    state         text NOT NULL DEFAULT 'ready'  -- `open` and `closing` follow from the clock
                  CHECK (state IN ('ready','claimed','collected','validated','scored','trained',
                                   'deployed','rejected','skipped','failed')),
    epoch         bigint NOT NULL DEFAULT 0,     -- grows with each claim; every write compares it
    owner         text,
    lease_until   timestamptz,
    batch_id      text,
    reason        text,
    metrics       jsonb NOT NULL DEFAULT '{}',
    created_at    timestamptz NOT NULL DEFAULT now(),
    updated_at    timestamptz NOT NULL DEFAULT now(),
    attempts      integer NOT NULL DEFAULT 0,    -- claims since the last one that made progress
    retry_at      timestamptz,                   -- no automatic claim of a failed window before
    collected_at  timestamptz,
    scored        jsonb                          -- manifest of the last scoring, to resume from
);

-- The trajectories of a window's last collection. Any other trajectory of the window is late.
CREATE TABLE babylon.collected (
    window_id      text NOT NULL,
    trajectory_id  text NOT NULL,
    PRIMARY KEY (window_id, trajectory_id)
);

-- Trajectories that were committed after the collection of a window that was then trained. Only a
-- recipe trains them; `admitted_to` is its window.
CREATE TABLE babylon.late (
    trajectory_id  text PRIMARY KEY,
    window_id      text NOT NULL,
    reason         text NOT NULL,
    seen_at        timestamptz NOT NULL DEFAULT now(),
    admitted_to    text
);
CREATE INDEX late_by_window ON babylon.late (window_id);

CREATE TABLE babylon.rejections (
    window_id      text NOT NULL,
    trajectory_id  text NOT NULL,
    reason         text NOT NULL,
    detail         text NOT NULL,
    PRIMARY KEY (window_id, trajectory_id)
);

CREATE TABLE babylon.scores (
    window_id      text NOT NULL,
    trajectory_id  text NOT NULL,
    scorer         text NOT NULL,
    score          double precision NOT NULL,
    components     jsonb NOT NULL DEFAULT '{}',
    low            double precision,             -- ends of the interval, if the scorer gives one
    high           double precision,
    reasons        text[] NOT NULL DEFAULT '{}',
    seen           text,                         -- the trajectory as the judge saw it
    PRIMARY KEY (window_id, trajectory_id)
);

-- One row for each paid reply of a judge. `problem` is the reason why a reply was not usable. The
-- arrays are in the order in which the judge saw the trajectories.
CREATE TABLE babylon.judgments (
    judgment_id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    window_id          text NOT NULL,
    scenario_id        text NOT NULL,
    key                text NOT NULL,
    judge              text NOT NULL,
    method             text NOT NULL,
    rubric             text NOT NULL,            -- name@digest of its text
    prompt_hash        text NOT NULL,
    trajectory_ids     text[] NOT NULL,
    scores             double precision[] NOT NULL,
    explanations       text[] NOT NULL,
    problem            text,
    prompt_tokens      integer NOT NULL,
    completion_tokens  integer NOT NULL,
    usd                double precision NOT NULL,
    created_at         timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX judgments_by_key ON babylon.judgments (key);
CREATE INDEX judgments_by_window ON babylon.judgments (window_id);
CREATE INDEX judgments_by_time ON babylon.judgments (created_at);

-- The primary key guarantees that no trajectory is trained twice.
CREATE TABLE babylon.trained (
    trajectory_id  text PRIMARY KEY,
    window_id      text NOT NULL,
    batch_id       text NOT NULL,
    trained_at     timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX trained_by_window ON babylon.trained (window_id);

-- One row for each job at an external training service. It is written before the job is
-- submitted, so that the next claim of the window finds a job that was already started.
CREATE TABLE babylon.training_jobs (
    window_id       text NOT NULL,
    attempt         integer NOT NULL,
    epoch           bigint NOT NULL,             -- of the claim that waits for the job
    trainer         text NOT NULL,
    model           text NOT NULL,               -- the service's id of the trained model
    parent_version  integer NOT NULL,
    parent_step     integer NOT NULL,            -- the model's checkpoint that the job starts from
    trajectory_ids  text[] NOT NULL,
    counts          jsonb NOT NULL,              -- of what was sent
    excluded        jsonb NOT NULL,              -- counts of what was not sent, by reason
    job_id          text UNIQUE,                 -- NULL until the service's answer is stored
    status          text NOT NULL DEFAULT 'preparing'
                    CHECK (status IN
                           ('preparing','submitting','running','done','failed','expired')),
    reason          text,
    step            integer,                     -- the checkpoint that the job made
    metrics         jsonb NOT NULL DEFAULT '{}',
    created_at      timestamptz NOT NULL DEFAULT now(),
    submitted_at    timestamptz,                 -- NULL: not submitted
    deadline        timestamptz NOT NULL,
    PRIMARY KEY (window_id, attempt)
);
-- The service trains a model's newest checkpoint: two open jobs would build on each other.
CREATE UNIQUE INDEX one_open_training_job ON babylon.training_jobs (model)
    WHERE status IN ('preparing','submitting','running');

-- Every checkpoint that training committed. Version 0 is the base model.
CREATE TABLE babylon.policies (
    policy_version  integer PRIMARY KEY,
    parent_version  integer REFERENCES babylon.policies,
    kind            text NOT NULL CHECK (kind IN ('base','full','lora')),
    uri             text NOT NULL,
    base_model      text NOT NULL,
    window_id       text,
    batch_id        text UNIQUE,
    metrics         jsonb NOT NULL DEFAULT '{}',
    verdict         jsonb,
    created_at      timestamptz NOT NULL DEFAULT now(),
    removed_at      timestamptz,                 -- set before the checkpoint's files are deleted
    digest          text,                        -- of the files; NULL if none was taken
    checks          jsonb                        -- the last checks before a route
);

-- A frozen set of worlds, registered at first use. Code generates the worlds; the digest detects
-- that the code changed.
CREATE TABLE babylon.suites (
    name           text NOT NULL,
    version        integer NOT NULL,
    digest         text NOT NULL,
    scenarios      integer NOT NULL,
    registered_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (name, version)
);

-- A player's result on one world of a suite. Neither weights nor worlds change, so each seed is
-- played once.
CREATE TABLE babylon.arena_results (
    suite_digest  text NOT NULL,
    player        text NOT NULL,
    seed          bigint NOT NULL,
    result        jsonb NOT NULL,
    played_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (suite_digest, player, seed)
);

-- Append-only; the newest row is in force. Gateways listen on channel babylon_routes. A second arm,
-- the challenger, answers a share of the agents, chosen by salt.
CREATE TABLE babylon.routes (
    route_version       bigint PRIMARY KEY,
    policy_version      integer NOT NULL REFERENCES babylon.policies,
    author              text NOT NULL,
    reason              text NOT NULL,
    created_at          timestamptz NOT NULL DEFAULT now(),
    mode                text NOT NULL DEFAULT 'replace'
                        CHECK (mode IN ('replace','ab','canary')),
    challenger_version  integer REFERENCES babylon.policies,
    share               double precision CHECK (share > 0 AND share < 1),
    salt                text,                    -- the experiment's id, the same at every share
    CHECK (CASE WHEN mode = 'replace' THEN num_nonnulls(challenger_version, share, salt) = 0
                ELSE num_nulls(challenger_version, share, salt) = 0 END),
    CHECK (challenger_version <> policy_version)
);
CREATE INDEX routes_by_salt ON babylon.routes (salt) WHERE salt IS NOT NULL;

-- A policy that every gateway loads before a route may name it. The author renews `open_until`; a
-- proposal that is not renewed ends.
CREATE TABLE babylon.proposals (
    proposal_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    policy_version  integer NOT NULL REFERENCES babylon.policies,
    author          text NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT now(),
    open_until      timestamptz NOT NULL,
    outcome         text                         -- NULL while it is open
);
CREATE INDEX open_proposals ON babylon.proposals (open_until) WHERE outcome IS NULL;

-- State of each gateway, written every few seconds. An older row belongs to a gateway that stopped.
CREATE TABLE babylon.gateways (
    gateway_id      text PRIMARY KEY,
    url             text NOT NULL,
    route_version   bigint NOT NULL,             -- that it serves
    problem         text,
    seen_at         timestamptz NOT NULL DEFAULT now(),
    recorded_until  timestamptz,                 -- all earlier calls are in babylon.calls
    loaded          integer[] NOT NULL DEFAULT '{}',
    refusals        jsonb NOT NULL DEFAULT '{}', -- policy version -> problem
    in_flight       jsonb NOT NULL DEFAULT '{}', -- policy version -> calls
    proposals_read  bigint                       -- the newest proposal that it has seen
);

-- One row for each answered request, with its exact tokens: training data.
CREATE TABLE babylon.calls (
    call_id               text PRIMARY KEY,
    agent_id              text,
    trajectory_id         text,
    step_number           integer,
    policy_version        integer NOT NULL,
    route_version         bigint NOT NULL,
    model                 text NOT NULL,
    messages              text NOT NULL,         -- JSON
    response              text NOT NULL,
    prompt_token_ids      integer[] NOT NULL,
    completion_token_ids  integer[] NOT NULL,
    logprobs              real[] NOT NULL,       -- of the sampled distribution, after temperature
    temperature           double precision NOT NULL,
    top_p                 double precision NOT NULL,
    max_tokens            integer NOT NULL,
    seed                  bigint,
    finish_reason         text NOT NULL,
    trainable             boolean NOT NULL,
    untrainable_reason    text,
    started_at            timestamptz NOT NULL,
    latency_ms            integer NOT NULL,
    arm                   text NOT NULL DEFAULT 'champion',
    key_id                text,
    parameters            text NOT NULL DEFAULT '{}'  -- JSON: the request's other fields
);
CREATE INDEX calls_by_trajectory ON babylon.calls (trajectory_id, step_number);
CREATE INDEX calls_by_policy ON babylon.calls (policy_version, started_at);
CREATE INDEX calls_by_route ON babylon.calls (route_version);

-- Answers that were not recorded (RECORDING=available on a full disk).
CREATE TABLE babylon.recording_gaps (
    gateway_id  text NOT NULL,
    began_at    timestamptz NOT NULL,
    ended_at    timestamptz NOT NULL,
    calls       integer NOT NULL,
    reason      text NOT NULL,
    PRIMARY KEY (gateway_id, began_at)
);

-- The arm of a trajectory's first call. The trajectory keeps it when the share changes.
CREATE TABLE babylon.trajectory_arms (
    salt           text NOT NULL,
    trajectory_id  text NOT NULL,
    arm            text NOT NULL CHECK (arm IN ('champion','challenger')),
    created_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (salt, trajectory_id)
);

-- Each analysis of an experiment: its decision and all figures.
CREATE TABLE babylon.experiment_reviews (
    salt         text NOT NULL,
    reviewed_at  timestamptz NOT NULL DEFAULT now(),
    decision     text NOT NULL CHECK (decision IN ('promote','rollback','keep','insufficient')),
    numbers      jsonb NOT NULL,
    PRIMARY KEY (salt, reviewed_at)
);

-- Keys that gateways accept. Only the SHA-256 of the secret is stored.
CREATE TABLE babylon.api_keys (
    key_id           text PRIMARY KEY,
    name             text NOT NULL,
    digest           bytea NOT NULL,
    scopes           text[] NOT NULL
                     CHECK (scopes <@ '{infer,deploy,read}' AND cardinality(scopes) > 0),
    agents           text[],                     -- it may call for these agents; NULL: for all
    max_concurrency  integer CHECK (max_concurrency > 0),
    created_at       timestamptz NOT NULL DEFAULT now(),
    revoked_at       timestamptz
);

-- First and last observation of a market in a window. Several trackers write to one row. Values:
-- USD of a price, P(YES) of a probability, 1 (YES) or 0 (NO) of a resolution.
CREATE TABLE babylon.observations (
    kind         text NOT NULL CHECK (kind IN ('price','probability','resolution')),
    name         text NOT NULL,                  -- ticker, or id of the prediction market
    window_id    text NOT NULL,
    question     text,
    first_at     timestamptz NOT NULL,
    first_value  double precision NOT NULL,
    last_at      timestamptz NOT NULL,
    last_value   double precision NOT NULL,
    PRIMARY KEY (kind, name, window_id)
);
CREATE INDEX observations_by_window ON babylon.observations (window_id);
