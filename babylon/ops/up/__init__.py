"""``babylon up``: the whole system under one supervisor on this machine.

Each process logs to ``<home>/logs`` and is on record in ``<home>/run``. ``up`` starts only what is
not running and returns when everything answers, so cron or a systemd timer may repeat it. ``down``
stops exactly the recorded processes. The embedded Postgres runs while a process uses it.
"""

from babylon.ops.up.lifecycle import (
    ServiceStatus,
    UpReport,
    WorkInHand,
    down,
    status,
    up,
    work_in_hand,
)

__all__ = ["ServiceStatus", "UpReport", "WorkInHand", "down", "status", "up", "work_in_hand"]
