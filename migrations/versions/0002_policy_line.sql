-- One line of policies, the fate of each trajectory's learning, and a row for each attempt of a
-- window. No table of 0001 changes, so that an older program can run beside this version.

-- The window that trains, validates and deploys now. It holds the line while it holds its lease
-- under this epoch (`babylon.store.line`).
CREATE TABLE babylon.line (
    one        boolean PRIMARY KEY DEFAULT true CHECK (one),
    window_id  text,
    epoch      bigint
);
INSERT INTO babylon.line DEFAULT VALUES;

-- Policies whose play was given back: they never serve again, nor do their descendants.
CREATE TABLE babylon.releases (
    policy_version  integer PRIMARY KEY REFERENCES babylon.policies,
    author          text NOT NULL,
    reason          text NOT NULL,
    released_at     timestamptz NOT NULL DEFAULT now()
);

-- The trajectories of those policies. Another update may train them.
CREATE TABLE babylon.released (
    trajectory_id   text NOT NULL,
    policy_version  integer NOT NULL REFERENCES babylon.releases,
    window_id       text NOT NULL,
    PRIMARY KEY (trajectory_id, policy_version)
);
CREATE INDEX released_by_window ON babylon.released (window_id);

-- One row for each claim of a window. An attempt without an end runs, or its worker died and
-- nobody claimed the window since.
CREATE TABLE babylon.attempts (
    window_id   text NOT NULL,
    epoch       bigint NOT NULL,
    owner       text NOT NULL,
    began_at    timestamptz NOT NULL DEFAULT now(),
    began_from  text NOT NULL,                   -- the state that it went on from
    ended_at    timestamptz,
    ended_in    text,                            -- the state that it left
    ending      text CHECK (ending IN ('deployed','rejected','skipped','failed','stopped',
                                       'waits','superseded','lost')),
    reason      text,
    PRIMARY KEY (window_id, epoch)
);

CREATE VIEW babylon.policy_fates AS
WITH RECURSIVE serving AS (
    SELECT policy_version, challenger_version FROM babylon.routes
    ORDER BY route_version DESC LIMIT 1
), line AS (
    SELECT p.policy_version, p.parent_version
    FROM babylon.policies p JOIN serving USING (policy_version)
    UNION
    SELECT p.policy_version, p.parent_version
    FROM babylon.policies p JOIN line ON p.policy_version = line.parent_version
)
SELECT p.policy_version, p.window_id, p.batch_id, CASE
    WHEN EXISTS (SELECT FROM babylon.releases r WHERE r.policy_version = p.policy_version)
        THEN 'released for training again'
    WHEN EXISTS (SELECT FROM line WHERE line.policy_version = p.policy_version)
        THEN 'in the champion''s line'
    WHEN EXISTS (SELECT FROM serving s WHERE s.challenger_version = p.policy_version)
        THEN 'in a challenger'
    WHEN EXISTS (SELECT FROM babylon.windows w
                 WHERE w.batch_id = p.batch_id AND w.state = 'trained')
        THEN 'in a candidate'
    WHEN EXISTS (SELECT FROM babylon.routes r
                 WHERE p.policy_version IN (r.policy_version, r.challenger_version))
        THEN 'in a policy rolled back'
    ELSE 'in a rejected candidate' END AS fate
FROM babylon.policies p;

-- One row for each trajectory that a window collected, trained or gave back.
CREATE VIEW babylon.learning AS
SELECT t.trajectory_id, t.window_id, f.policy_version, coalesce(f.fate, 'in no policy') AS fate
FROM babylon.trained t LEFT JOIN babylon.policy_fates f USING (batch_id)
UNION ALL
SELECT DISTINCT ON (r.trajectory_id) r.trajectory_id, r.window_id, r.policy_version,
       'released for training again'
FROM babylon.released r
WHERE NOT EXISTS (SELECT FROM babylon.trained t WHERE t.trajectory_id = r.trajectory_id)
UNION ALL
SELECT c.trajectory_id, min(c.window_id), NULL, 'free'
FROM babylon.collected c
WHERE NOT EXISTS (SELECT FROM babylon.trained t WHERE t.trajectory_id = c.trajectory_id)
  AND NOT EXISTS (SELECT FROM babylon.released r WHERE r.trajectory_id = c.trajectory_id)
GROUP BY c.trajectory_id;
