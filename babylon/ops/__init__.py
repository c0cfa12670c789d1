"""Operation of a system: up, backup, doctor, demo, status page, and pages for Prefect."""
