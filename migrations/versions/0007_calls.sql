-- A key may record play over HTTP.
ALTER TABLE babylon.api_keys DROP CONSTRAINT api_keys_scopes_check;
ALTER TABLE babylon.api_keys ADD CONSTRAINT api_keys_scopes_check
    CHECK (scopes <@ '{infer,record,read,deploy}' AND cardinality(scopes) > 0);
