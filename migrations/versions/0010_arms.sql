-- A route may have a second arm: a challenger that answers a share of the agents, chosen by salt.
ALTER TABLE babylon.routes
    ADD COLUMN mode                text NOT NULL DEFAULT 'replace'
                                   CHECK (mode IN ('replace','ab','canary')),
    ADD COLUMN challenger_version  integer REFERENCES babylon.policies,
    ADD COLUMN share               double precision CHECK (share > 0 AND share < 1),
    ADD COLUMN salt                text,          -- of one experiment, the same at every share
    ADD CHECK (CASE WHEN mode = 'replace' THEN num_nonnulls(challenger_version, share, salt) = 0
                    ELSE num_nulls(challenger_version, share, salt) = 0 END),
    ADD CHECK (challenger_version <> policy_version);
CREATE INDEX routes_by_salt ON babylon.routes (salt) WHERE salt IS NOT NULL;

-- A policy that every gateway is to load before a route may name it. Its author keeps it open;
-- one that is not renewed is over.
CREATE TABLE babylon.proposals (
    proposal_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    policy_version  integer NOT NULL REFERENCES babylon.policies,
    author          text NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT now(),
    open_until      timestamptz NOT NULL,
    outcome         text                          -- null while it is open
);
CREATE INDEX open_proposals ON babylon.proposals (open_until) WHERE outcome IS NULL;

-- What a gateway's engine holds, what it cannot load and why, and who is being answered by what.
ALTER TABLE babylon.gateways
    DROP COLUMN refused,
    ADD COLUMN loaded     integer[] NOT NULL DEFAULT '{}',
    ADD COLUMN refusals   jsonb NOT NULL DEFAULT '{}',   -- policy version -> problem
    ADD COLUMN in_flight  jsonb NOT NULL DEFAULT '{}',   -- policy version -> calls
    ADD COLUMN proposals_read bigint;                    -- it knew this one and those before

-- The arm that a trajectory began with, so that it ends with it whatever the share becomes.
CREATE TABLE babylon.trajectory_arms (
    salt           text NOT NULL,
    trajectory_id  text NOT NULL,
    arm            text NOT NULL CHECK (arm IN ('champion','challenger')),
    created_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (salt, trajectory_id)
);
