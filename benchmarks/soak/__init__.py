"""A soak: the whole system plays and trains simulated hours while its services are killed.

    SOAK_MINUTES=90 python -m benchmarks.soak DIRECTORY

Agents play through the gateway, dated an hour further with each window. Runs of the deployment
``one-window`` train the windows. Meanwhile one service after the other is killed, Postgres too, and
the disk is filled up. At the end every promise is checked in Postgres, and DIRECTORY has a report
with plots. The clock of the machine is not skewed: that needs a machine of its own.
"""
