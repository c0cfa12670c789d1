ALTER TABLE babylon.calls VALIDATE CONSTRAINT calls_until;
