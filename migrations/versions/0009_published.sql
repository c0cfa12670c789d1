-- The ledger of the published dataset. A row is written after the commit that holds its file.
CREATE TABLE babylon.published (
    repository      text NOT NULL,
    config          text NOT NULL,               -- the dataset's table
    window_id       text NOT NULL,
    path            text NOT NULL,               -- in the repository
    sha256          text NOT NULL,
    bytes           bigint NOT NULL,
    rows            bigint NOT NULL,
    agents          text[] NOT NULL,             -- that the file tells of, for an erasure
    trajectory_ids  text[] NOT NULL,
    revision        text NOT NULL,               -- the commit
    published_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (repository, config, window_id)
);

-- Agents and trajectories that were taken down: no later file of the dataset holds them.
CREATE TABLE babylon.withheld (
    kind         text NOT NULL CHECK (kind IN ('agent','trajectory')),
    name         text NOT NULL,
    reason       text NOT NULL,
    withheld_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (kind, name)
);
