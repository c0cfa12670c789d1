-- With a default: older gateways insert the other columns only, and go on.
ALTER TABLE babylon.recording_gaps ADD COLUMN call_ids text[] NOT NULL DEFAULT '{}';
