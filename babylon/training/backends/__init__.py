"""Who computes an update: one trainer a file, behind one signature, chosen by ``TRAINER``."""
