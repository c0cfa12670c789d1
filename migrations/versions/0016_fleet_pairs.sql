-- A world that the champion's fleet played, and the P&L of the champion before it in the same world.
-- A new table only: older workers neither read nor write it, and go on.
CREATE TABLE babylon.fleet_pairs (
    number       bigint GENERATED ALWAYS AS IDENTITY,  -- the order in which the bets were made
    window_id    text NOT NULL,
    champion     integer NOT NULL REFERENCES babylon.policies,
    predecessor  integer NOT NULL REFERENCES babylon.policies,
    scenario_id  text NOT NULL,
    fleet_usd    double precision NOT NULL,            -- mean over the agents
    before_usd   double precision NOT NULL,
    room_usd     double precision NOT NULL,            -- bound of the difference
    PRIMARY KEY (champion, predecessor, window_id, scenario_id)
);
