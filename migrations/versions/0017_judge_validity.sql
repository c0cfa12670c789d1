-- One judge's opinions of a window beside the outcomes, for the trust in later windows.
CREATE TABLE babylon.judge_validity (
    window_id  text NOT NULL,
    judge      text NOT NULL,
    method     text NOT NULL,
    rubric     text NOT NULL,
    groups     jsonb NOT NULL,      -- [{opinions, errors, outcomes, readings}], without names
    judged_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (window_id, judge, method, rubric)
);

-- Prompt tokens that the provider took from its cache, by its own count.
ALTER TABLE babylon.judgments ADD COLUMN cached_tokens integer NOT NULL DEFAULT 0;
