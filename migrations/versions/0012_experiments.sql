-- Each look at an experiment: what was decided, and all numbers.
CREATE TABLE babylon.experiment_reviews (
    salt         text NOT NULL,
    reviewed_at  timestamptz NOT NULL DEFAULT now(),
    decision     text NOT NULL CHECK (decision IN ('promote','rollback','keep','insufficient')),
    numbers      jsonb NOT NULL,
    PRIMARY KEY (salt, reviewed_at)
);
CREATE INDEX calls_by_route ON babylon.calls (route_version);
