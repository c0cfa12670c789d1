-- Figures of a window's data, and how they differ from those of the windows before it.
CREATE TABLE babylon.window_health (
    window_id    text PRIMARY KEY,
    minutes      integer NOT NULL,
    figures      jsonb NOT NULL,                 -- name -> number
    alarms       jsonb NOT NULL DEFAULT '[]',    -- [{"figure": ..., "reason": ...}]
    measured_at  timestamptz NOT NULL DEFAULT now()
);

-- How far the import of a set of files has come: one row a file. Both this table and the staged rows
-- are unlogged, so that after a crash of the server they are empty together.
CREATE UNLOGGED TABLE babylon.import_progress (
    import_id   text NOT NULL,                   -- names the staging tables too
    file        text NOT NULL,
    bytes       bigint NOT NULL DEFAULT 0,       -- of the file, staged so far
    lines       bigint NOT NULL DEFAULT 0,
    updated_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (import_id, file)
);
