-- Our own schema. It never refers to the game's tables, so it can live in somebody else's database.

CREATE TABLE babylon.windows (
    window_id    text PRIMARY KEY,
    minutes      integer NOT NULL,
    state        text NOT NULL DEFAULT 'open'
                 CHECK (state IN ('open','claimed','trained','deployed','rejected','skipped','failed')),
    epoch        bigint NOT NULL DEFAULT 0,      -- grows with each claim; every write names its own
    owner        text,
    lease_until  timestamptz,
    batch_id     text,
    reason       text,
    metrics      jsonb NOT NULL DEFAULT '{}',
    created_at   timestamptz NOT NULL DEFAULT now(),
    updated_at   timestamptz NOT NULL DEFAULT now()
);

-- One row a request that the gateway answered, with the exact tokens: tomorrow's training data.
CREATE TABLE babylon.calls (
    call_id               text PRIMARY KEY,
    agent_id              text,
    trajectory_id         text,
    step_number           integer,
    policy_version        integer NOT NULL,
    route_version         bigint NOT NULL,
    model                 text NOT NULL,
    messages              text NOT NULL,          -- JSON
    response              text NOT NULL,
    prompt_token_ids      integer[] NOT NULL,
    completion_token_ids  integer[] NOT NULL,
    logprobs              real[] NOT NULL,        -- of the distribution sampled from (after temperature)
    temperature           double precision NOT NULL,
    top_p                 double precision NOT NULL,
    max_tokens            integer NOT NULL,
    seed                  bigint,
    finish_reason         text NOT NULL,
    trainable             boolean NOT NULL,
    untrainable_reason    text,
    started_at            timestamptz NOT NULL,
    latency_ms            integer NOT NULL
);
CREATE INDEX calls_by_trajectory ON babylon.calls (trajectory_id, step_number);

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
    created_at      timestamptz NOT NULL DEFAULT now()
);

-- Append-only: the newest row is the route in force. Gateways are notified on channel babylon_routes.
CREATE TABLE babylon.routes (
    route_version   bigint PRIMARY KEY,
    policy_version  integer NOT NULL REFERENCES babylon.policies,
    author          text NOT NULL,
    reason          text NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT now()
);

-- Live gateways and the route each serves, and the one that it cannot serve and why;
-- a row older than a few seconds is a dead gateway's.
CREATE TABLE babylon.gateways (
    gateway_id     text PRIMARY KEY,
    url            text NOT NULL,
    route_version  bigint NOT NULL,
    refused        bigint,
    problem        text,
    seen_at        timestamptz NOT NULL DEFAULT now()
);

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
    PRIMARY KEY (window_id, trajectory_id)
);

-- The promise that no trajectory is trained twice is this primary key.
CREATE TABLE babylon.trained (
    trajectory_id  text PRIMARY KEY,
    window_id      text NOT NULL,
    batch_id       text NOT NULL,
    trained_at     timestamptz NOT NULL DEFAULT now()
);
