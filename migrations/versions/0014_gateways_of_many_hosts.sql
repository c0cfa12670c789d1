-- Gateways on many hosts. New tables only: older workers neither read nor write them, and go on.

-- A key with which a deployment asks this one gateway, and nobody else: new with each process.
CREATE TABLE babylon.gateway_probes (
    gateway_id  text PRIMARY KEY REFERENCES babylon.gateways ON DELETE CASCADE,
    probe_key   text NOT NULL
);

-- Gateways for which deployments do not wait, until they follow again.
CREATE TABLE babylon.quarantine (
    gateway_id  text PRIMARY KEY REFERENCES babylon.gateways ON DELETE CASCADE,
    reason      text NOT NULL,
    since       timestamptz NOT NULL DEFAULT now()
);
