-- A key that was rotated: its former secret is accepted until then. Older gateways know only `digest`.
ALTER TABLE babylon.api_keys
    ADD COLUMN former_digest bytea CHECK (length(former_digest) = 32),
    ADD COLUMN former_until  timestamptz,
    ADD COLUMN rotated_at    timestamptz;
