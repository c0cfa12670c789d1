-- One row a job that a provider trains for us. It is written before the job is submitted, so that
-- whoever claims the window next finds what its predecessor began.
CREATE TABLE babylon.training_jobs (
    window_id       text NOT NULL,
    attempt         integer NOT NULL,
    epoch           bigint NOT NULL,            -- of the claim that follows the job
    trainer         text NOT NULL,
    model           text NOT NULL,              -- the provider's id of the model that is trained
    parent_version  integer NOT NULL,
    parent_step     integer NOT NULL,           -- the model's checkpoint that the job starts from
    trajectory_ids  text[] NOT NULL,            -- that are trained
    counts          jsonb NOT NULL,             -- of what was sent
    excluded        jsonb NOT NULL,             -- and of what was not, by reason
    job_id          text UNIQUE,                -- NULL until the provider's answer is stored
    status          text NOT NULL DEFAULT 'preparing'
                    CHECK (status IN
                           ('preparing','submitting','running','done','failed','expired')),
    reason          text,
    step            integer,                    -- the checkpoint that the job made
    metrics         jsonb NOT NULL DEFAULT '{}',
    created_at      timestamptz NOT NULL DEFAULT now(),
    submitted_at    timestamptz,                -- NULL: certainly never
    deadline        timestamptz NOT NULL,
    PRIMARY KEY (window_id, attempt)
);
-- A provider trains a model's newest checkpoint: two jobs at once would train each other's.
CREATE UNIQUE INDEX one_open_training_job ON babylon.training_jobs (model)
    WHERE status IN ('preparing','submitting','running');
