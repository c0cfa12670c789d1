ALTER TABLE babylon.judge_validity
    ADD COLUMN canaries jsonb NOT NULL DEFAULT '[]',               -- [{kind, value}]
    ADD COLUMN log_e double precision[] NOT NULL DEFAULT '{}';     -- evidence, by stake
