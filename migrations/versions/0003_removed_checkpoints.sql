-- Set before the directory is deleted: what the row promises is there.
ALTER TABLE babylon.policies ADD COLUMN removed_at timestamptz;
