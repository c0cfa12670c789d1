-- New tables only: older workers neither read nor write them, and go on.

-- Replies of one policy to the prompt of a recorded decision. A decision is answered again once for
-- each policy and temperature. It is trained when its trajectory is (babylon.trained).
CREATE TABLE babylon.sampled_replies (
    trajectory_id    text NOT NULL,
    step             integer NOT NULL CHECK (step >= 0),
    policy_version   integer NOT NULL REFERENCES babylon.policies,
    temperature      double precision NOT NULL CHECK (temperature > 0),
    window_id        text NOT NULL,
    valued_by        text NOT NULL,               -- simulator, or a judge's scorer
    prompt_token_ids integer[] NOT NULL,
    replies          jsonb NOT NULL,              -- [{completion_token_ids, value}]
    created_at       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (trajectory_id, step, policy_version, temperature)
);
CREATE INDEX sampled_replies_window ON babylon.sampled_replies (window_id);

-- Settings of an update, and where they came from. A generation is never changed.
CREATE TABLE babylon.population (
    generation  integer NOT NULL CHECK (generation >= 0),
    member      integer NOT NULL CHECK (member >= 0),
    parent      integer,                          -- a member of the generation before
    origin      text NOT NULL,                    -- founder, elite or mutant
    genes       jsonb NOT NULL,                   -- {gene: value}
    created_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (generation, member)
);

-- A window's siblings: one row for each member that was trained on it, by one claim.
CREATE TABLE babylon.siblings (
    window_id      text NOT NULL,
    batch_id       text NOT NULL,
    generation     integer NOT NULL,
    member         integer NOT NULL,
    parent_version integer NOT NULL REFERENCES babylon.policies,
    uri            text NOT NULL,                 -- of the checkpoint, a reference of the home
    fitness        double precision,              -- P&L less the parent's in the same worlds, USD
    fitness_error  double precision,              -- its standard error
    worlds         integer NOT NULL DEFAULT 0,
    metrics        jsonb NOT NULL DEFAULT '{}',
    trajectory_ids text[] NOT NULL DEFAULT '{}',
    chosen         boolean NOT NULL DEFAULT false,
    created_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (batch_id, member),
    FOREIGN KEY (generation, member) REFERENCES babylon.population
);
CREATE UNIQUE INDEX siblings_one_is_chosen ON babylon.siblings (batch_id) WHERE chosen;
