-- A bound for the calls so far, proven below while gateways write. A later run finds it made.
DO $$
DECLARE bound timestamptz := date_trunc('day', greatest(
    now(), (SELECT max(started_at) FROM babylon.calls)) AT TIME ZONE 'UTC') AT TIME ZONE 'UTC'
    + interval '7 days';
BEGIN
    IF NOT EXISTS (SELECT FROM pg_constraint WHERE conname = 'calls_until') THEN
        EXECUTE format(
            'ALTER TABLE babylon.calls ADD CONSTRAINT calls_until CHECK (started_at < %L) NOT VALID',
            bound);
    END IF;
END $$;
