"""Backup and restore of a system: the database's rows and the home's files."""
