"""Calls in partitions, limits of keys, rules of recording, and the scope ``record``.

Attaching the table of the calls so far needs a proof that they end before a bound. It is a
constraint that is added in one transaction and proven outside it, by a scan that lets gateways
write. The last transaction only renames and attaches. Each step may run again.
"""

from babylon.migrations import run_concurrently, run_file

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    run_file("0007_calls_until.sql")
    run_concurrently("0007_calls_proven.sql")
    run_file("0007_calls.sql")
