-- One row a reply that a judge was paid for. ``problem`` says why a reply could not be used; the
-- arrays are in the order in which the trajectories were shown: the permutation.
CREATE TABLE babylon.judgments (
    judgment_id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    window_id          text NOT NULL,
    scenario_id        text NOT NULL,
    key                text NOT NULL,
    judge              text NOT NULL,
    method             text NOT NULL,
    rubric             text NOT NULL,             -- name@digest of its text
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

ALTER TABLE babylon.scores
    ADD low double precision,                     -- ends of the interval, where the scorer tells
    ADD high double precision,
    ADD reasons text[] NOT NULL DEFAULT '{}',
    ADD seen text;                                -- the trajectory as the judge saw it
