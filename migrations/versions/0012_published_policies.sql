-- The ledger of published policies. A row is written after the commit that holds the files.
CREATE TABLE babylon.published_policies (
    repository      text NOT NULL,
    policy_version  int NOT NULL REFERENCES babylon.policies,
    form            text NOT NULL CHECK (form IN ('merged','adapter')),
    bytes           bigint NOT NULL,
    revision        text NOT NULL,               -- the commit
    published_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (repository, policy_version)
);
