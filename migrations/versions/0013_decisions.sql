-- Decisions by people: may a policy be deployed, and may windows be trained at all now.
-- New tables only: older workers neither read nor write them, and go on.
CREATE TABLE babylon.approvals (
    policy_version  integer PRIMARY KEY REFERENCES babylon.policies,
    window_id       text NOT NULL,
    asked_at        timestamptz NOT NULL DEFAULT now(),
    open_until      timestamptz NOT NULL,        -- without an answer by then: not deployed
    approved        boolean,
    author          text,
    reason          text,
    answered_at     timestamptz,
    CHECK ((approved IS NULL) = (answered_at IS NULL) AND (approved IS NULL) = (author IS NULL))
);

-- While a hold has no end, no run chooses a window by itself.
CREATE TABLE babylon.holds (
    hold_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    author    text NOT NULL,
    reason    text NOT NULL,
    since     timestamptz NOT NULL DEFAULT now(),
    ended_at  timestamptz,
    ended_by  text
);
CREATE UNIQUE INDEX holds_one_at_a_time ON babylon.holds ((true)) WHERE ended_at IS NULL;
