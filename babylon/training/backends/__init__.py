"""Trainers that compute an update, one a file, with one signature. ``TRAINER`` chooses one."""
