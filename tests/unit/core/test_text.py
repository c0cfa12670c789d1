"""Redaction: texts that are secrets, and market texts that are not."""

import pytest

from babylon.core.text import find_secrets, redact

SECRETS = {
    "sk-proj-abcdefghijklmnop1234": "key",
    "hf_abcdefghijklmnopqrst": "key",
    "ghp_abcdefghijklmnopqrst0123": "key",
    "AKIAIOSFODNN7EXAMPLE": "key",
    "xoxb-1234567890-abc": "key",
    "4b8d1a3c9e7f60524b8d1a3c9e7f60524b8d1a3c": "key",
    "0x" + "0123456789abcdef" * 4: "key",
    "Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6cXV4MTIz": "key",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl": "token",
    "Bearer abcdefghijklmnop.123": "token",
    "password=hunter22": "password",
    'api_key: "0123abcd"': "password",
    "OPENAI_API_KEY=0123abcd": "password",
    "export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLE": "password",
    r"{\"db_password\": \"hunter22\"}": "password",
    "ann.o'hara+news@mail.example.org": "email",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----": "private-key",
    "-----BEGIN PRIVATE KEY-----\nMIIE cut off": "private-key",
}
HARMLESS = [
    "BTCAI $101,240.50 (+3.2%), 24h volume $1,234,567",
    "Will TSLAI be above $400 on 2025-11-14T10:00:00.000Z? YES 0.61 NO 0.39",
    "market 550e8400-e29b-41d4-a716-446655440000, agent 7d3f1c2a",
    "wallet 0x52908400098527886E0F7030069857D2E4169EE7",
    "@ailonmusk: secret: the token is going to the moon",
    '{"action":"trade","trade":{"type":"perp","market":"NVDAI","action":"open_long"}}',
    "https://example.org/a/very/long/path/to/an/article-about-the-markets-of-today",
]


@pytest.mark.parametrize(("secret", "kind"), SECRETS.items())
def test_a_secret_is_found_named_and_gone(secret: str, kind: str) -> None:
    text = f"balance $1,000; note: {secret}\nnews: none"
    assert find_secrets(text) == (kind,)
    clean = redact(text)
    assert f"[REDACTED:{kind}]" in clean and clean.startswith("balance $1,000; note: ")
    assert find_secrets(clean) == () and redact(clean) == clean
    assert secret not in clean


@pytest.mark.parametrize("user", ["bob", ""])
def test_a_password_in_a_url_goes_and_the_rest_of_the_url_stays(user: str) -> None:
    clean = redact(f"postgres://{user}:s3cret@db.example.org/x")
    assert clean == "postgres://[REDACTED:password]@db.example.org/x"
    assert find_secrets(clean) == () and redact(clean) == clean


@pytest.mark.parametrize("text", HARMLESS)
def test_market_texts_are_not_redacted(text: str) -> None:
    assert find_secrets(text) == () and redact(text) == text


def test_a_known_secret_goes_whatever_its_form() -> None:
    assert redact("the word is swordfish", {"swordfish"}) == "the word is [REDACTED:key]"
    assert find_secrets("the word is swordfish", {"swordfish"}) == ("key",)


def test_a_text_of_many_beginnings_of_tokens_is_searched_in_linear_time() -> None:
    """By the square of its length, this text would take a quarter of an hour."""
    text = "eyJ-" * 125_000
    assert redact(text) == text
    assert redact(f"jwt-eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln {text}").endswith(text)


def test_overlapping_known_secrets_are_removed_whole() -> None:
    known = ["swordfish", "swordfish-and-a-tail"]
    for order in (known, known[::-1]):
        assert redact("it is swordfish-and-a-tail", order) == "it is [REDACTED:key]"
