-- Spans of agents that are not finished trajectories yet. A span is known by its ids for as long as
-- its trajectory, so that it may be sent again.
CREATE TABLE babylon.play_spans (
    trace_id       text NOT NULL,
    span_id        text NOT NULL,
    trajectory_id  text NOT NULL REFERENCES babylon.plays ON DELETE CASCADE,
    root           boolean NOT NULL,             -- the trajectory is a trace, and this span ended it
    span           text,                         -- JSON; NULL once the trajectory is finished
    received_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (trace_id, span_id)
);
CREATE INDEX play_spans_of_trajectory ON babylon.play_spans (trajectory_id);
CREATE INDEX play_spans_waiting ON babylon.play_spans (trajectory_id) WHERE span IS NOT NULL;
