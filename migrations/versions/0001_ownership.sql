-- A database without any table is ours. Any other database is foreign: nothing outside schema
-- babylon is ever created or altered in it. This is decided once, before the first table.

CREATE TABLE babylon.database (
    one         boolean PRIMARY KEY DEFAULT true CHECK (one),
    ours        boolean NOT NULL,
    decided_at  timestamptz NOT NULL DEFAULT now()
);

INSERT INTO babylon.database (ours)
SELECT NOT EXISTS (
    SELECT FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f')
      AND n.nspname NOT IN ('babylon', 'information_schema')
      AND n.nspname !~ '^pg_'
      AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype = 'e')
);
