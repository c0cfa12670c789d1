-- A key may record play over HTTP.
ALTER TABLE babylon.api_keys DROP CONSTRAINT api_keys_scopes_check;
ALTER TABLE babylon.api_keys ADD CONSTRAINT api_keys_scopes_check
    CHECK (scopes <@ '{infer,record,read,deploy}' AND cardinality(scopes) > 0);

-- Limits of a key, over all gateways; NULL: no limit.
ALTER TABLE babylon.api_keys
    ADD COLUMN requests_per_minute integer CHECK (requests_per_minute > 0),
    ADD COLUMN tokens_per_minute   integer CHECK (tokens_per_minute > 0);

-- What each gateway has admitted for a key with limits in this minute (since 1970). The gateways
-- read each other's rows. Unlogged: after a crash of the server the minute begins anew.
CREATE UNLOGGED TABLE babylon.key_usage (
    key_id      text NOT NULL,
    gateway_id  text NOT NULL,
    minute      bigint NOT NULL,
    requests    integer NOT NULL,
    tokens      bigint NOT NULL,
    running     integer NOT NULL,
    seen_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (key_id, gateway_id)
);

-- Which calls are recorded, and without which fields. The rules of a call's key and agent both hold.
CREATE TABLE babylon.recording_rules (
    kind      text NOT NULL CHECK (kind IN ('key', 'agent')),
    subject   text NOT NULL,                     -- a key_id, an agent, or a prefix as crowd-*
    share     double precision NOT NULL CHECK (share BETWEEN 0 AND 1),
    redact    text[] NOT NULL,                   -- names of JSON fields
    set_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (kind, subject)
);

-- Calls in partitions by UTC day, which retention drops. A call's time never changes, so a copy of
-- it meets the key of the same partition: each has its own, and the table needs none. `calls_first`
-- has what was there before, `calls_other` what no partition is made for.
ALTER TABLE babylon.calls RENAME TO calls_first;
ALTER INDEX babylon.calls_pkey RENAME TO calls_first_pkey;
ALTER INDEX babylon.calls_by_trajectory RENAME TO calls_first_by_trajectory;
ALTER INDEX babylon.calls_by_policy RENAME TO calls_first_by_policy;
ALTER INDEX babylon.calls_by_route RENAME TO calls_first_by_route;
CREATE TABLE babylon.calls (LIKE babylon.calls_first INCLUDING DEFAULTS)
    PARTITION BY RANGE (started_at);
CREATE INDEX calls_by_trajectory ON babylon.calls (trajectory_id, step_number);
CREATE INDEX calls_by_policy ON babylon.calls (policy_version, started_at);
CREATE INDEX calls_by_route ON babylon.calls (route_version);
CREATE TABLE babylon.calls_other (
    LIKE babylon.calls_first INCLUDING DEFAULTS, PRIMARY KEY (call_id)
);
DO $$
DECLARE bound timestamptz := (
    SELECT substring(pg_get_constraintdef(oid) FROM '''([^'']+)''')
    FROM pg_constraint WHERE conname = 'calls_until');
BEGIN
    EXECUTE format('ALTER TABLE babylon.calls ATTACH PARTITION babylon.calls_first'
                   ' FOR VALUES FROM (MINVALUE) TO (%L)', bound);
END $$;
ALTER TABLE babylon.calls ATTACH PARTITION babylon.calls_other DEFAULT;
ALTER TABLE babylon.calls_first DROP CONSTRAINT calls_until;
