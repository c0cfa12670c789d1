-- NULL: of an older worker. A window that was scored again has other siblings.
ALTER TABLE babylon.siblings ADD COLUMN scored text;              -- digest of the scored window
