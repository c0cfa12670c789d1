ALTER TABLE babylon.policies
    ADD COLUMN digest  text,     -- of the checkpoint's files; null: nobody took it
    ADD COLUMN checks  jsonb;    -- the newest checks before a route was to name the policy

-- The newest prompts that a policy answered.
CREATE INDEX calls_by_policy ON babylon.calls (policy_version, started_at);
