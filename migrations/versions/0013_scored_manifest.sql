-- The manifest of the last scoring (babylon.core.types.Scored as JSON): a later run resumes from it.
ALTER TABLE babylon.windows ADD COLUMN scored jsonb;
