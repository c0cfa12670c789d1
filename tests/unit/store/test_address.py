"""Database URLs as users have them: Prisma's, those of hosting services, several hosts, sockets."""

import pytest

from babylon.core.errors import ConfigError
from babylon.store.address import CONNECT_S, QUERY_S, parse_url

ACCOUNT = "postgresql://user:p%40ss@"


def test_a_plain_url_has_limits_utc_and_the_games_schema():
    address = parse_url(f"{ACCOUNT}db.example.com/game")
    (attempt,) = address.attempts()
    arguments = address.arguments(*attempt)
    assert address.place == "db.example.com:5432/game"
    assert arguments["server_settings"] == {
        "application_name": "babylon",
        "timezone": "UTC",
        "search_path": '"public"',
    }
    assert (arguments["timeout"], arguments["command_timeout"]) == (CONNECT_S, QUERY_S)
    assert "statement_cache_size" not in arguments


def test_a_pooler_gets_no_settings_at_the_start_and_no_named_statements():
    address = parse_url(f"{ACCOUNT}db/game?pgbouncer=true&schema=the%20game")
    arguments = address.arguments(*address.attempts()[0])
    assert arguments["server_settings"] == {"application_name": "babylon"}
    assert arguments["statement_cache_size"] == 0
    assert address.preamble == (
        "SET LOCAL search_path TO \"the game\"; SET LOCAL timezone TO 'UTC';"
    )


@pytest.mark.parametrize(
    "url",
    [
        # Neon, Supabase, AWS, Heroku, Prisma's documentation
        f"{ACCOUNT}ep-a-pooler.eu.neon.tech/db?sslmode=require&channel_binding=require",
        f"{ACCOUNT}aws-0-eu.pooler.supabase.com:6543/postgres?pgbouncer=true&connection_limit=1",
        f"{ACCOUNT}a.rds.amazonaws.com:5432/db?schema=public&sslmode=require",
        "postgres://u:p@ec2-1.amazonaws.com:5432/d1?sslmode=require",
        f"{ACCOUNT}h/d?schema=public&connection_limit=5&pool_timeout=2&socket_timeout=3"
        "&connect_timeout=4&statement_cache_size=0&sslmode=prefer&sslaccept=accept_invalid_certs",
        f"{ACCOUNT}h/d?keepalives=1&keepalives_idle=30&tcp_user_timeout=1000&gssencmode=disable",
    ],
)
def test_parameters_of_other_clients_never_reach_the_server(url):
    address = parse_url(url)
    assert not address.settings
    assert "p%40ss" in address.dsn or "u:p@" in address.dsn


def test_the_limits_and_the_size_of_the_pool_are_parameters_of_the_url():
    address = parse_url(
        f"{ACCOUNT}h/d?connect_timeout=4&socket_timeout=2.5&connection_limit=7&work_mem=9MB"
    )
    assert (address.connect_s, address.query_s, address.connections) == (4, 2.5, 7)
    assert address.settings == {"work_mem": "9MB"}
    assert parse_url(f"{ACCOUNT}h/d?socket_timeout=0").query_s is None
    assert parse_url(f"{ACCOUNT}h/d?connection_limit=1").connections == 4  # a stage needs them


def test_of_several_hosts_the_writable_one_is_taken():
    address = parse_url(f"{ACCOUNT}one:5433,two,[::1]:5434/game")
    assert address.attempts() == [
        ("one", 5433, "read-write"),
        ("two", 5432, "read-write"),
        ("::1", 5434, "read-write"),
    ]
    assert address.place == "one:5433,two:5432,::1:5434/game"
    anywhere = parse_url(f"{ACCOUNT}one,two/game?target_session_attrs=prefer-standby").attempts()
    assert [(host, kind) for host, _, kind in anywhere] == [
        ("one", "standby"),
        ("two", "standby"),
        ("one", "any"),
        ("two", "any"),
    ]


def test_a_socket_is_a_host():
    for url in (
        "postgresql://u@/game?host=/run/postgresql&port=5433",
        "postgresql://u@%2Frun%2Fpostgresql:5433/game",
    ):
        assert parse_url(url).hosts == (("/run/postgresql", 5433),), url
    assert parse_url("postgresql:///game").place == "localhost:5432/game"


@pytest.mark.parametrize(
    ("parameters", "sslmode", "authority", "system"),
    [
        ("sslaccept=strict", None, None, True),
        ("sslaccept=strict&sslcert=ca.pem", "verify-full", "ca.pem", False),
        ("sslaccept=accept_invalid_certs&sslcert=ca.pem&sslmode=require", "require", None, False),
        ("sslmode=verify-ca&sslrootcert=ca.pem", "verify-ca", "ca.pem", False),
        ("sslmode=verify-full&sslrootcert=system", None, None, True),
        ("sslcert=client.pem&sslkey=client.key&sslmode=require", "require", None, False),
    ],
)
def test_prismas_parameters_of_tls_become_postgres_own(parameters, sslmode, authority, system):
    address = parse_url(f"{ACCOUNT}h/d?{parameters}")
    query = dict(pair.split("=") for pair in address.dsn.partition("?")[2].split("&") if pair)
    assert (query.get("sslmode"), query.get("sslrootcert")) == (sslmode, authority)
    assert (address.ssl is not None) is system


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("prisma+postgres://accelerate.prisma-data.net/?api_key=x", "take its direct URL"),
        ("mysql://u:p@h/d", "DATABASE_URL starts with 'mysql'"),
        (f"{ACCOUNT}h:99999/d", "names no usable port"),
        (f"{ACCOUNT}one,two:x/d", "names no usable port"),
        (f"{ACCOUNT}h/d?sslidentity=me.p12", "convert it with `openssl pkcs12`"),
        (f"{ACCOUNT}h/d?sslaccept=perhaps", "write strict or accept_invalid_certs"),
        (f"{ACCOUNT}h/d?sslaccept=strict&sslmode=disable", "remove one"),
        (f"{ACCOUNT}h/d?connect_timeout=soon", "write a number of at least 0"),
        (f"{ACCOUNT}h/d?socket_timeout=-1", "write a number of at least 0"),
    ],
)
def test_an_address_that_cannot_be_used_names_the_remedy(url, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_url(url)
    assert "p%40ss" not in str(caught.value) and "p@ss" not in str(caught.value)


@pytest.mark.parametrize("mark", ["/", "?", "#", "["])
@pytest.mark.parametrize("password", ["hush{}quiet", "1234{}quiet", "hush{}q=uiet"])
def test_a_password_that_is_not_encoded_is_told_and_not_shown(mark, password):
    """Its mark ends the place of hosts and ports, so that it looks like a port."""
    with pytest.raises(ConfigError, match="as %2F") as caught:
        parse_url(f"postgresql://u:{password.format(mark)}@h:5432/d")
    assert not any(part in str(caught.value) for part in ("hush", "uiet", "1234"))
    assert caught.value.__cause__ is None


def test_an_account_with_an_at_sign_may_be_a_parameter():
    assert parse_url("postgresql://h:5432/d?user=me@azure").hosts == (("h", 5432),)
