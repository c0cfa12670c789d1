-- One row for each trajectory that a call named or a client started over HTTP. It belongs to the key
-- of that call. `started_at` and below: set by a start over HTTP.
CREATE TABLE babylon.plays (
    trajectory_id  text PRIMARY KEY,
    key_id         text NOT NULL,
    agent_id       text,
    began_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at     timestamptz,
    scenario_id    text,
    minutes        integer,                      -- length of its window
    window_id      text,
    finished_at    timestamptz,                  -- its row is in the game's table
    steps          integer                       -- of that row
);
CREATE INDEX plays_by_time ON babylon.plays (began_at);

-- Steps of trajectories that are not finished, as JSON. The game's row takes their place.
CREATE TABLE babylon.play_steps (
    trajectory_id  text NOT NULL REFERENCES babylon.plays ON DELETE CASCADE,
    number         integer NOT NULL,
    at             timestamptz NOT NULL,
    step           text NOT NULL,
    PRIMARY KEY (trajectory_id, number)
);

-- Rewards, metrics, labels and comments. Rows are only added: of several with one name for one
-- target, the newest counts, or the newest that a window knew when it was collected.
CREATE TABLE babylon.feedback (
    trajectory_id  text NOT NULL REFERENCES babylon.plays ON DELETE CASCADE,
    step           integer NOT NULL DEFAULT -1,  -- -1: of the whole trajectory
    call_id        text NOT NULL DEFAULT '',     -- '': of no single call
    name           text NOT NULL,
    value          double precision,
    label          text,
    comment        text,
    given_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (trajectory_id, step, call_id, name, given_at)
);

-- Conversations without a named trajectory: which one the next call continues. The digest is of the
-- messages up to and with an answer; NULL: two trajectories have the same. Lost in a crash of the
-- server, which starts new trajectories and loses no call.
CREATE UNLOGGED TABLE babylon.continuations (
    digest         bytea PRIMARY KEY,
    trajectory_id  text,
    noted_at       timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX continuations_by_time ON babylon.continuations (noted_at);
