"""A soak: the whole system plays and trains simulated hours while its services are killed.

    SOAK_MINUTES=60 python -m benchmarks.soak DIRECTORY

Agents play through the gateway, dated an hour further with each window. Runs of the deployment
``backfill`` train the windows. Meanwhile every service is killed again and again, Postgres too, the
disk is filled up, and the clocks of the gateway and of a worker jump, if there is a C compiler. The
last part (``SOAK_QUIET``, an eighth) has no faults: whether processes grow is seen there. At the
end every promise is checked in Postgres, and DIRECTORY has a report with plots.
"""
