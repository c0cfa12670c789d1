-- NULL: of an older worker. A window that was scored again needs another job.
ALTER TABLE babylon.training_jobs ADD COLUMN scored text;         -- digest of the scored window
