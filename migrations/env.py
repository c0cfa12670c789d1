"""Alembic's entry point. The caller passes a connection and commits its transaction.

An advisory lock makes concurrent migrations wait. All own tables are in schema ``babylon``.
"""

from alembic import context
from sqlalchemy import Connection, text

ADVISORY_LOCK = 0x6261_6279_6C6F_6E  # "babylon"

connection: Connection = context.config.attributes["connection"]
connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
if connection.execute(text("SELECT to_regnamespace('babylon')")).scalar() is None:
    connection.execute(text("CREATE SCHEMA babylon"))
context.configure(connection=connection, version_table_schema="babylon")
context.run_migrations()
