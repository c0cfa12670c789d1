"""Alembic's entry point. The caller passes a connection; each version is a transaction.

All own tables are in schema ``babylon``.
"""

from alembic import context
from sqlalchemy import Connection, text

connection: Connection = context.config.attributes["connection"]
context.configure(
    connection=connection, version_table_schema="babylon", transaction_per_migration=True
)
if connection.execute(text("SELECT to_regnamespace('babylon')")).scalar() is None:
    connection.execute(text("CREATE SCHEMA babylon"))
context.run_migrations()
