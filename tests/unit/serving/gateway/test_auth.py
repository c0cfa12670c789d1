from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from babylon.core.api_keys import local_key, new_key, parse_key
from babylon.core.errors import ConfigError
from babylon.serving.gateway.auth import KeyRing, Principal
from babylon.serving.openai_wire import RequestError

LOCAL = new_key("local")


def bearer(key: object, scheme: str = "Bearer") -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"{scheme} {key}".encode("latin-1"))]


def bound(*agents: str) -> Principal:
    return Principal(key_id="k", digest=b"", scopes=frozenset({"infer"}), agents=agents)


def test_the_local_key_calls_for_everybody_and_deploys_nothing() -> None:
    principal = KeyRing(LOCAL).admit(bearer(LOCAL, "bearer"), "infer")
    assert (principal.key_id, principal.attributed_agent("anybody")) == ("local", "anybody")
    with pytest.raises(RequestError, match="lacks the scope deploy"):
        KeyRing(LOCAL).admit(bearer(LOCAL), "deploy")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(""),
        bearer("local"),
        bearer(new_key("local")),
        bearer(new_key()),
        bearer(f"{LOCAL}x"),
        bearer("sk-babylon-local-"),
        bearer("sk-babylon-local-\xff"),
        bearer(LOCAL, "Basic"),
        bearer(LOCAL) + bearer(LOCAL),
    ],
)
def test_what_is_no_key_of_ours_is_turned_away_without_an_echo(headers: list[Any]) -> None:
    with pytest.raises(RequestError) as caught:
        KeyRing(LOCAL).admit(headers, "infer")
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert LOCAL.secret not in str(caught.value)


@pytest.mark.parametrize(
    ("agents", "asked", "granted"),
    [
        (("a",), "a", "a"),
        (("a",), None, "a"),
        (("a", "b"), "b", "b"),
        (("crowd-*", "a"), "crowd-7", "crowd-7"),
    ],
)
def test_a_key_has_own_agents(agents: tuple[str, ...], asked: str | None, granted: str) -> None:
    assert bound(*agents).attributed_agent(asked) == granted


@pytest.mark.parametrize(
    ("agents", "asked"),
    [(("a",), "b"), (("a", "b"), None), (("crowd-*",), None), (("crowd-*",), "crow"), (("a",), "")],
)
def test_a_bound_key_speaks_for_nobody_else(agents: tuple[str, ...], asked: str | None) -> None:
    with pytest.raises(RequestError, match="this key is for") as caught:
        bound(*agents).attributed_agent(asked)
    assert caught.value.status == 403


def test_a_key_is_read_back_as_it_was_made_and_hides_its_secret_behind_the_digest() -> None:
    key = new_key()
    assert parse_key(str(key)) == key
    assert key.secret.encode() not in key.digest and len(key.digest) == 32


def test_anthropics_header_is_as_good_as_openais_and_one_of_them_is_enough() -> None:
    header = (b"x-api-key", str(LOCAL).encode())
    assert KeyRing(LOCAL).admit([header], "infer").key_id == "local"
    assert KeyRing(LOCAL).admit([header, *bearer(LOCAL)], "infer").key_id == "local"
    for headers in ([header, header], [header, *bearer("wrong")]):
        with pytest.raises(RequestError, match="no valid API key"):
            KeyRing(LOCAL).admit(headers, "infer")


@pytest.mark.parametrize(("left_s", "accepted"), [(60, True), (0, False)])
def test_a_former_secret_is_accepted_until_its_time(left_s: float, accepted: bool) -> None:
    former, present = new_key("k"), new_key("k")
    ring = KeyRing(LOCAL)
    ring._principals["k"] = Principal(
        key_id="k",
        digest=present.digest,
        scopes=frozenset({"infer"}),
        former_digest=former.digest,
        former_until=datetime.now(UTC) + timedelta(seconds=left_s),
    )
    assert ring.admit(bearer(present), "infer").key_id == "k"
    with nullcontext() if accepted else pytest.raises(RequestError, match="no valid API key"):
        assert ring.admit(bearer(former), "infer").key_id == "k"
    with pytest.raises(RequestError, match="no valid API key"):
        ring.admit(bearer(new_key("k")), "infer")


def test_the_local_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert local_key(home) == local_key(home)
    (path,) = home.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("something else")
    with pytest.raises(ConfigError, match=r"local\.key holds no babylon key"):
        local_key(home)


def test_the_users_of_a_client_are_agents_unless_the_key_names_its_own() -> None:
    assert bound("alice").agent_of("end user 7") == "alice"
    for key in bound("alice", "bob"), bound("fleet-*"):
        assert key.agent_of("bob") == "bob"
