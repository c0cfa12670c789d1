"""Database URLs: Postgres' own parameters, Prisma's, and those of hosting services.

The time limits are parameters of the URL too, with Prisma's names: ``connect_timeout`` for a host,
``socket_timeout`` for a query. ``0`` turns a limit off.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from babylon.core.errors import ConfigError

CONNECT_S = 10.0
"""A server on another continent answers within two seconds; a failover retries."""
QUERY_S = 60.0
"""As long as a lease. The longest query of a month of windows takes four seconds."""
MAX_CONNECTIONS = 10
_LEAST_CONNECTIONS = 4  # a collection takes three, a heartbeat one
_SCHEMES = {"postgres", "postgresql", "postgresql+asyncpg"}
# The driver reads these. A parameter in neither set is a setting of the server.
_DRIVER = {
    "dbname", "database", "gsslib", "host", "krbsrvname", "passfile", "password", "port", "sslcert",
    "sslcrl", "sslkey", "sslmode", "ssl_max_protocol_version", "ssl_min_protocol_version",
    "sslnegotiation", "sslpassword", "sslrootcert", "target_session_attrs", "user",
}  # fmt: skip
# Parameters of other clients that ask for nothing that this driver can do.
_DROPPED = {
    "channel_binding", "gssencmode", "keepalives", "keepalives_count", "keepalives_idle",
    "keepalives_interval", "load_balance_hosts", "pool_timeout", "sslcompression", "sslsni",
    "statement_cache_size", "tcp_user_timeout",
}  # fmt: skip
_ENCODE = "in a password, write / as %2F, ? as %3F, # as %23, [ as %5B and @ as %40"
_WRITABLE = "read-write"
_PREFER_STANDBY = "prefer-standby"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A parsed database URL, the value of the environment variable ``variable``.

    ``dsn`` has no host. ``settings`` are the server settings that the URL asks for. ``schema`` is
    that of the game's tables. ``pooled``: a pooler may give each transaction another session.
    """

    variable: str
    dsn: str
    hosts: tuple[tuple[str, int], ...]
    schema: str
    settings: Mapping[str, str]
    ssl: ssl.SSLContext | None
    session: str
    pooled: bool
    connections: int
    connect_s: float | None
    query_s: float | None

    @property
    def place(self) -> str:
        """``host:port/database`` for messages, without the password."""
        hosts = ",".join(f"{host or 'localhost'}:{port}" for host, port in self.hosts)
        return hosts + urlsplit(self.dsn).path

    @property
    def preamble(self) -> str:
        """The statements that begin a transaction behind a pooler."""
        schema = self.schema.replace('"', '""')
        return f"SET LOCAL search_path TO \"{schema}\"; SET LOCAL timezone TO 'UTC';"

    def attempts(self) -> list[tuple[str, int, str]]:
        """Each (host, port, kind of session) to try, in order."""
        if self.session != _PREFER_STANDBY:
            return [(*host, self.session) for host in self.hosts]
        return [(*host, session) for session in ("standby", "any") for host in self.hosts]

    def arguments(self, host: str, port: int, session: str) -> dict[str, Any]:
        """The arguments for ``asyncpg.connect`` to one host.

        Postgres' default search path starts with a schema named like the account. For an account
        called babylon that is our own schema, so the path is always set. A pooler refuses these
        settings at the start of a session, so there each transaction sets them.
        """
        settings = {"application_name": "babylon", **self.settings}
        if not self.pooled:
            schema = self.schema.replace('"', '""')
            settings = {"timezone": "UTC", "search_path": f'"{schema}"'} | settings
        arguments: dict[str, Any] = {
            "dsn": self.dsn,
            "host": host or None,  # None: the usual Unix sockets, then localhost
            "port": port,
            "server_settings": settings,
            "target_session_attrs": session,
            "timeout": self.connect_s,
            "command_timeout": self.query_s,
        }
        if self.ssl is not None:
            arguments["ssl"] = self.ssl
        if self.pooled:
            arguments["statement_cache_size"] = 0
        return arguments


def parse_url(url: str, *, variable: str = "DATABASE_URL") -> Address:
    """Read a database URL; ``variable`` is its name in messages.

    Prisma's ``schema`` names the schema of the game's tables, ``public`` by default;
    ``pgbouncer=true`` says that a pooler is in between (one is also detected);
    ``sslaccept=strict`` verifies the server's certificate and name; ``sslcert`` without ``sslkey``
    is the certificate authority; ``connection_limit`` limits the pool. With several hosts, the
    first one that can be written to is taken, unless ``target_session_attrs`` says otherwise.

    Raises:
        ConfigError: the URL is not a Postgres URL, or asks for something that is not supported.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # its text may quote the password
        raise ConfigError(f"{variable} is no URL: {_ENCODE}") from None
    if parts.scheme not in _SCHEMES:
        hint = " (Prisma's proxy is no database: take its direct URL)" * ("prisma" in parts.scheme)
        raise ConfigError(
            f"{variable} starts with {parts.scheme!r}{hint}:"
            " write postgresql://USER:PASSWORD@HOST/NAME"
        )
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    # Drivers disagree about parameters that they do not know, so each is sorted out here.
    account, _, netloc = parts.netloc.rpartition("@")
    if not account and "@" in "".join((parts.path, parts.fragment, *query)):
        raise ConfigError(f"{variable} has an @ behind its host: {_ENCODE}")
    named = query.pop("host", ""), query.pop("port", "")
    hosts = _hosts(variable, *(named if named[0] else (unquote(netloc), named[1])))
    options = {name: query.pop(name) for name in list(query) if name in _OPTIONS}
    context = _encryption(variable, query)
    driver = {name: value for name, value in query.items() if name in _DRIVER}
    user = f"{account}@" if account else ""
    session = driver.pop("target_session_attrs", _WRITABLE if len(hosts) > 1 else "any")
    limit = _number(variable, "connection_limit", options, MAX_CONNECTIONS)
    return Address(
        variable=variable,
        dsn=urlunsplit(parts._replace(scheme="postgresql", netloc=user, query=urlencode(driver))),
        hosts=hosts,
        schema=options.get("schema", "public"),
        settings={name: value for name, value in query.items() if name not in _DRIVER | _DROPPED},
        ssl=context,
        session=session,
        pooled=options.get("pgbouncer") == "true",
        connections=min(MAX_CONNECTIONS, max(_LEAST_CONNECTIONS, int(limit))),
        connect_s=_number(variable, "connect_timeout", options, CONNECT_S) or None,
        query_s=_number(variable, "socket_timeout", options, QUERY_S) or None,
    )


_OPTIONS = {"connect_timeout", "connection_limit", "pgbouncer", "schema", "socket_timeout"}


def _hosts(variable: str, names: str, ports: str) -> tuple[tuple[str, int], ...]:
    """Parse ``host[:port],...``; a directory is that of a Unix socket."""
    found: list[tuple[str, int]] = []
    default = ports.split(",")
    for index, name in enumerate(names.split(",")):
        host, port = name, default[min(index, len(default) - 1)]
        try:
            if name.startswith("/"):
                host, _, own = name.partition(":")
            else:
                split = urlsplit(f"//{name}")
                host, own = split.hostname or "", str(split.port or "")
            number = int(own or port or 5432)
            if not 0 < number < 2**16:
                raise ValueError
        except ValueError:  # its text quotes the port, which may be the begin of a password
            raise ConfigError(
                f"{variable} names no usable port: write a number of at most 65535 behind the host;"
                f" {_ENCODE}"
            ) from None
        found.append((host, number))
    return tuple(found)


def _encryption(variable: str, query: dict[str, str]) -> ssl.SSLContext | None:
    """Translate Prisma's parameters of TLS to Postgres' own; return a context if they have none.

    Prisma's ``sslcert`` is the certificate of the authority; Postgres' own is the client's, and
    has an ``sslkey``.
    """
    if "sslidentity" in query:
        raise ConfigError(
            f"{variable} has sslidentity, a PKCS 12 file, which is not supported: convert it with"
            " `openssl pkcs12` to sslcert=client.crt and sslkey=client.key"
        )
    accept = query.pop("sslaccept", None)
    if accept not in (None, "strict", "accept_invalid_certs"):
        raise ConfigError(
            f"{variable} has sslaccept={accept}: write strict or accept_invalid_certs"
        )
    if "sslcert" in query and "sslkey" not in query and "sslrootcert" not in query:
        query["sslrootcert"] = query.pop("sslcert")
    if accept == "strict":
        if query.get("sslmode") == "disable":
            raise ConfigError(f"{variable} has sslaccept=strict and sslmode=disable: remove one")
        query["sslmode"] = "verify-full"
        query.setdefault("sslrootcert", "system")
    elif accept is not None and "sslrootcert" in query:
        del query["sslrootcert"]  # the driver would verify the certificate
    if query.get("sslrootcert") != "system":
        return None
    del query["sslrootcert"]
    query.pop("sslmode", None)
    return ssl.create_default_context()


def _number(variable: str, name: str, options: Mapping[str, str], default: float) -> float:
    try:
        number = float(options.get(name, default))
        if not 0 <= number < float("inf"):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{variable} has {name}={options[name]}: write a number of at least 0"
        ) from None
    return number
