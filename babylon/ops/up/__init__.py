"""``babylon up``: the whole system as a few detached processes of this machine.

Each process has a session of its own, logs to ``<home>/logs`` and is on record in ``<home>/run``.
There is no supervisor that could fail. ``up`` starts only what is not running and returns when
everything answers: repeated by hand, cron or a systemd timer, it restarts what died. ``down`` stops
exactly the recorded processes. The embedded Postgres is not among them: it runs while a process
uses it, and ``serving`` always does.
"""

from babylon.ops.up.lifecycle import ServiceStatus, down, status, up

__all__ = ["ServiceStatus", "down", "status", "up"]
