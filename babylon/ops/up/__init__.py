"""``babylon up``: the whole system as a few detached processes of this machine.

Each process logs to ``<home>/logs`` and is on record in ``<home>/run``. ``up`` starts only what is
not running and returns when everything answers, so cron or a systemd timer may repeat it. ``down``
stops exactly the recorded processes. The embedded Postgres runs while a process uses it.
"""

from babylon.ops.up.lifecycle import ServiceStatus, down, status, up

__all__ = ["ServiceStatus", "down", "status", "up"]
