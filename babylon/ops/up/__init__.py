"""``babylon up``: the whole system as a few detached processes of this machine.

Each process has a session of its own, logs to ``<home>/logs`` and is recorded in ``<home>/run``;
there is no supervisor to fail. ``up`` starts only what is not running and returns when everything
answers, so repeating it (by hand, cron or a systemd timer) brings back what died. ``down`` stops
exactly the recorded processes. The embedded Postgres has no entry: it runs while somebody uses it,
and the gateway always does.
"""

from babylon.ops.up.lifecycle import ServiceStatus, down, status, up

__all__ = ["ServiceStatus", "down", "status", "up"]
