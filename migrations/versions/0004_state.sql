-- `retired_at`: the window's play was removed. `recorded_at`: a trace that is imported is as old as
-- its calls, but new here. Both are added without a rewrite, and writers that do not know them go on.
ALTER TABLE babylon.windows ADD COLUMN retired_at timestamptz;
ALTER TABLE babylon.calls ADD COLUMN recorded_at timestamptz NOT NULL DEFAULT now();

-- References to files in the home become relative to it (`home:checkpoints/...`), so that the home
-- can move. Earlier versions wrote absolute paths. Only the layout of a home is rewritten: any other
-- path is a model outside the home. An earlier program reads the new form of no row, so its workers
-- stop before this migration; gateways that run keep their loaded policies.

UPDATE babylon.policies SET uri = regexp_replace(
    uri,
    '^(file://)?/.*/(checkpoints/\d{4}-\d\d-\d\dT\d{4}(\+[a-z0-9-]+)?-e\d+|models/embedded-\d+x\d+-seed-?\d+-[0-9a-f]{6})$',
    'home:\2'
)
WHERE uri ~ '^(file://)?/';

UPDATE babylon.windows SET scored = regexp_replace(
    replace(scored::text, '%2B', '+'),
    '"file://[^"]*/(artifacts/[^"/]+\.parquet)"',
    '"home:\1"',
    'g'
)::jsonb
WHERE scored::text LIKE '%"file://%';

UPDATE babylon.policies SET verdict = jsonb_set(
    verdict, '{report}', to_jsonb(regexp_replace(verdict->>'report', '^/.*/(arena/[^/]+)$', 'home:\1'))
)
WHERE verdict->>'report' LIKE '/%';
