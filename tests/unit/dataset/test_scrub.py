"""Scrubbing: eight kinds of secrets, in text, in JSON, in tokens; and what is no secret."""

import random

import msgspec
import pytest
from msgspec.structs import replace

from babylon.core.trajectories import Call
from babylon.dataset.messages import call_column
from babylon.dataset.scrub import ScrubError, cleaned, found, scrub
from babylon.dataset.trajectories import Selection, _shown, scrubbed

BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
SEED = "legal winner thank year wave sausage worth useful legal winner thank yellow"


def planted(count: int = 50) -> list[tuple[str, str]]:
    """(kind, secret), in turn of eight kinds; repeatable."""
    drawn = random.Random(7)

    def text(letters: str, size: int) -> str:
        return "".join(drawn.choice(letters) for _ in range(size))

    hexadecimal, alnum = "0123456789abcdef", "abcdefghijkmnopqrstuvwxyzABCDEFGHIJK0123456789"
    kinds = {
        "key": lambda: f"sk-proj-{text(alnum, 30)}7",
        "token": lambda: f"ghp_{text(alnum, 36)}",
        "private key": lambda: (
            f"-----BEGIN EC PRIVATE KEY-----\n{text(alnum, 60)}\n-----END EC PRIVATE KEY-----"
        ),
        "wallet": lambda: f"0x{text(hexadecimal, 40)}",
        "seed phrase": lambda: SEED,
        "email": lambda: f"{text('abcdef', 7)}.{text('xyz', 3)}@{text('klmno', 6)}.example.org",
        "phone": lambda: f"+44 20 7946 0{drawn.randrange(100, 999)}",
        "ip": lambda: ".".join(str(drawn.randrange(11, 250)) for _ in range(4)),
    }
    names = list(kinds)
    return [(names[i % 8], kinds[names[i % 8]]()) for i in range(count)]


def row(text: str, **changes: object) -> dict[str, object]:
    call = Call(
        step=0,
        messages=({"role": "user", "content": f"note {text} end"},),
        response="HOLD",
        prompt_token_ids=(1, 2),
        completion_token_ids=(3,),
        logprobs=(-0.5,),
    )
    return {
        "trajectory_id": "t-1",
        "agent_id": "agent-1",
        "players": [],
        "window_id": "2025-11-14T09:00",
        "scenario_id": "s",
        "calls": [call_column(call)],
        "token_ids_exact": True,
        "scrubbed": [],
        **changes,
    }


@pytest.mark.parametrize("where", ["prompt", "tool", "result", "reason", "key of an object"])
def test_fifty_planted_secrets_leave_no_text_and_no_token(where: str) -> None:
    for kind, secret in planted():
        given = row("nothing" if where != "prompt" else secret)
        document = msgspec.json.encode({"note": f"it is {secret}"}).decode()
        if where == "tool":
            function = {"name": "send", "arguments": document}
            message = {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": function}
            ]}  # fmt: skip
            given["calls"][0]["completion"] = [message]  # type: ignore[index]
        elif where == "result":
            given["steps"] = [{"result_json": document}]
        elif where == "reason":
            given["score_reasons"] = [f"It sent {secret} to a friend."]
        elif where == "key of an object":
            given["steps"] = [{"result_json": msgspec.json.encode({secret: 1}).decode()}]
        clean = scrubbed(given)
        told = msgspec.json.encode(clean).decode()
        assert secret not in told and msgspec.json.encode(secret).decode()[1:-1] not in told, kind
        assert clean["scrubbed"], (kind, where)
        (call,) = clean["calls"]
        assert (call["prompt_token_ids"], call["completion_token_ids"], call["logprobs"]) == (
            (None,) * 3
        )
        assert clean["token_ids_exact"] is False
        if where in ("result", "key of an object"):
            msgspec.json.decode(clean["steps"][0]["result_json"])


def test_what_is_no_secret_stays_as_it_is() -> None:
    for text in (
        "2025-11-14 09:00:12 price 1234.50 volume 1763110800000, trade-17 of window 10:00",
        "Will BTC close above 104,250.75 today? YES 412.5 shares, NO 603.1 shares, version 1.2.3",
        "the market will probably rise when news about that event comes from their source today",
        '{"action":"trade","trade":{"type":"prediction","market":"m1","amount":25.5}}',
        "clx9z1k2v0000qw08h3f7d2ab 6f1c2b3a-1111-4c2d-9e8f-aaaaaaaaaaaa 192 168",
        "127.0.0.1 and 0.0.0.0, ratio 3:2:1, tokens: 412, the secret is out",
        "see https://example.com/a:b or http://localhost:8000/v1 for basic understanding",
    ):
        assert scrub(text) == text and not found([text]), text


def test_a_password_of_an_address_or_a_header_needs_no_digit() -> None:
    for secret, text in (
        ("hunter", "postgresql://bob:hunterpw@localhost/db"),
        ("hunter", "mongodb+srv://u:hunteronly@cluster/x and more"),
        ("hunter", "redis://:hunterpw@cache:6379/0"),
        ("Ym9iOmh1bnRlcg", "Authorization: Basic Ym9iOmh1bnRlcg=="),
        ("Ym9iOmh1bnRlcg", '{\\"authorization\\": \\"basic Ym9iOmh1bnRlcg\\"}'),
    ):
        assert secret not in scrub(text) and not found([scrub(text)]), text


def test_no_sign_inside_a_password_and_none_around_it_hides_it() -> None:
    for secret, text in (
        ("9zKq8w", "postgres://bob:Xy/9zKq8w@db:5432/app"),
        ("ssw0rd", "postgres://bob:p@ssw0rd@db:5432/app"),
        ("b#c", "amqp://bob:a?b#c@mq and more"),
        ("hunter", r"https:\/\/bob:hunter22@host\/x"),
        ("hunter", r"https:\\\/\\\/bob:hunter22@host\\\/x"),
        ("hunter", "**Password:** hunter2222"),
        ("hunter", "**password**: `hunter2222`"),
        ("hunter", '"password" => "hunter2222"'),
        ("hunter", r"{\"note\": \"\"password\" => \"hunter2222\"\"}"),
        ("hunter", "password is: hunter2222"),
    ):
        assert secret not in scrub(text) and not found([scrub(text)]), text
    for text in (
        "http://localhost:8000/users/@bob and https://host:443/?to=@bob or http://[::1]:80/@x",
        "http://{host}:{port}/@bob http://host:PORT/@bob https://example.social/@bob",
        r'{"url":"https:\/\/example.com:8000\/@bob","b":"@carol"}',
        "smtp://127.0.0.1:{mail.port}?to=oncall@ and an `api-key` is refused",
        "users.filter(secret => isWanted(secret)) **Secret:** to hold",
    ):
        assert scrub(text) == text and not found([text]), text


@pytest.mark.parametrize("between", ["** **", "**", "|", " | ", "*", "_", "/", "`, `", " -> "])
def test_no_sign_between_the_words_of_a_seed_phrase_hides_it(between: str) -> None:
    text = between.join(SEED.split())
    for whole in (text, f"_{text}_"):
        assert "sausage" not in scrub(whole) and not found([scrub(whole)])
    assert not found([between.join(SEED.split()[:11])])


def test_escapes_hide_nothing() -> None:
    assert "hunter" not in scrub('{"a":"x\\npassword: hunter2222"}')
    assert scrub("mail bob\\u0040example.com") == "[ESCAPED]"
    assert (
        "sk-"
        not in cleaned({"result_json": '{"a":"line\\nsk-abcDEF1234567890abcd"}'})["result_json"]
    )


@pytest.mark.parametrize(
    "text",
    [
        "mail bob＠example.com",
        "mail ｂｏｂ＠ｅｘａｍｐｌｅ．ｃｏｍ",
        "mail bob\u200b@exam\u2060ple.com",
        "key sk-\u200bproj-abc\u00addefgh1234567890XYZ",
        "call ＋44 20 7946 0123",
        "mail bob\\uff20example.com",
        "mail bob\\u200b@example\\uFEFF.com",
    ],
)  # fmt: skip
def test_wide_and_invisible_characters_hide_nothing(text: str) -> None:
    assert found([text]) == {"ESCAPED"} and scrub(text) == "[ESCAPED]"
    assert cleaned({"result_json": msgspec.json.encode([text]).decode()}) == {
        "result_json": '["[ESCAPED]"]'
    }


@pytest.mark.parametrize(
    "text", ["👩\u200d👩\u200d👧 won", "上がる！　＠渋谷で、３月１２日", "soft\u00adhyphen"]
)  # fmt: skip
def test_wide_and_invisible_characters_of_prose_stay(text: str) -> None:
    assert found([text]) == frozenset() and scrub(text) == text
    assert found([f"{text} bob@example.com"]) == {"EMAIL"}
    assert scrub(f"{text} bob@example.com") == f"{text} [EMAIL]"


def test_a_number_that_is_named_a_telephone_is_one() -> None:
    assert scrub("phone number: 4155550123, amount: 4155550123") == "[PHONE], amount: 4155550123"
    for document in ({"userPhone": 4155550123}, {"mobile_no": "4155550123"}):
        clean = cleaned({"parameters_json": msgspec.json.encode(document).decode()})
        assert "4155550123" not in msgspec.json.decode(clean["parameters_json"])
        assert "4155550123" not in clean["parameters_json"]


def test_what_stands_beside_a_telephone_number_or_an_address_hides_neither() -> None:
    for secret, text in (
        ("7946", "call +44 20 7946 0958 - 24/7"),
        ("7946", "call +44 20 7946 0958 (2 lines) or 12"),
        ("555", "call +1 415 555 2671 9 to 5"),
        ("8a2e", "ip:2001:db8:85a3::8a2e:370:7334"),
        ("8a2e", "ip:2001:db8:85a3:0:1:8a2e:370:7334 ok"),
        ("8a2e", "at 2001:db8:85a3:0:1:8a2e:370:7334:8080"),
    ):
        assert secret not in scrub(text) and not found([scrub(text)]), text
    for text in ("ip:::1", "+12.50 -3.25 7.10", "00:11:22:33:44:55", "ratio:3:2:1", "a::b::c"):
        assert scrub(text) == text, text


def test_no_cell_of_a_table_no_tag_and_no_arrow_hides_a_password() -> None:
    for text in (
        *("| password | hunter2222 |", "**API key** | `hunter2222`", "password -> hunter2222"),
        *("<password>hunter2222</password>", "<parameter=password>hunter2222</parameter>"),
        "| user | password |\n| --- | --- |\n| bob | x |\n| amy | hunter2222 |\n",
        "user | password | note\r\n:--- | --- | ---\r\nbob | hunter2222 | x",
        "as told:\nuser,password\nbob,x\namy,hunter2222",
        "id;secret;name\n1;hunter2222;Bob",
    ):
        told = msgspec.json.encode({"result": text}).decode()
        for given in (text, told, f"{text}\n\nThe end."):
            assert "hunter" not in scrub(given) and not found([scrub(given)]), given
        assert scrub(f"{text}\n\nThe end.").endswith("The end.")
    assert "hunter" not in scrub("id\tsecret\tname\n1\thunter2222\tBob")
    for text in (
        "| Password | Login |\n| --- | --- |\n| yes | no |",
        "The password, please\nI need it, 2 times",
        "| market | price |\n| --- | --- |\n| secret ballot 2025 | 0.4 |",
    ):
        assert scrub(text) == text and not found([text]), text


def test_secrets_of_common_programs_are_found() -> None:
    for secret, text in (
        ("hunter", "Server=db;Uid=sa;Pwd=hunter2222;"),
        *(("hunter", f"{name}=hunter2222") for name in ("DB_PASS", "API_TOKEN", "refresh-token")),
        *(("hunter", f"run --{name} hunter2222 now") for name in ("password", "token", "api-key")),
        ("jos", "mail josé@example.com"),
        ("bob", "mail bob@exämple.de"),
        ("иван", "иван@пример.рф"),
        ("17,", f"[{','.join(['17'] * 64)}]"),
    ):
        assert secret not in scrub(text) and not found([scrub(text)]), text
    for text in (
        *("PWD=/home/agent", "first_pass: 0.123456", "the --token option", "5 tokens: 412.50 USD"),
        *(
            "上がる@渋谷で、３月",
            "long $TRUMP@125.95",
            "5@12.50",
            f"[{','.join(['17'] * 63)}]",
            f"[{','.join(['301'] * 64)}]",
        ),
    ):
        assert scrub(text) == text and not found([text]), text


def test_a_signed_amount_is_no_telephone_number() -> None:
    drawn = random.Random(3)
    amounts = [drawn.uniform(0, 10**power) for power in range(8) for _ in range(200)]
    for amount in amounts:
        for text in (f"P&L {amount:+.2f} USD", f"P&L {amount:+.6f}", f"P&L {amount:+.4f} (-3.25)"):
            assert scrub(text) == text
    assert not found(["P&L by day: +151.54 -3.25 7.10"])
    for number in ("+1.415.555.2671", "+1.4155552671", "+44 20.7946.0958", "+1 415.555.2671"):
        assert scrub(f"call {number}.") == "call [PHONE]."


def test_a_path_of_words_is_not_drawn_at_random() -> None:
    for text in (
        "https://www.nytimes.com/2025/11/14/business/Federal-Reserve-Interest-Rates-Powell.html",
        "/markets/us/wall-st-futures-rise-Fed-rate-cut-hopes-2025-11-14/",
        "docs/benchmarks/2026-11-30/Qwen2-Instruct/run_A/learning_curve_of_GPT5_in_Q3",
    ):
        assert scrub(text) == text
    drawn, letters = random.Random(4), f"{BASE58}0OIl+/-_"
    for _ in range(1000):
        key = "".join(drawn.choice(letters) for _ in range(44))
        assert key not in scrub(f"https://example.com/2025/reset-Password/{key}")


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_json_inside_a_text_hides_no_password_and_no_seed_phrase(levels: int) -> None:
    for secret, document in (
        ("correcthorse", {"api_key": "x", "password": "correcthorse"}),
        ("sausage", SEED.split()),
    ):
        text = msgspec.json.encode(document).decode()
        for _ in range(levels - 1):
            text = msgspec.json.encode({"arguments": text}).decode()
        assert found([text]) and secret not in scrub(text), text


@pytest.mark.parametrize("size", [40, 64])
def test_a_key_of_hexadecimal_digits_needs_no_prefix(size: int) -> None:
    drawn = random.Random(size)
    key = "".join(drawn.choice("0123456789abcdef") for _ in range(size))
    for text in (
        *(f"my key {key} ok", f'{{"note": "{key}"}}', f"KEY={key.upper()}"),
        *(f"dop_v1_{key}", f"0X{key.upper()}", f"a_0x{key}", f"x_{key}_{key}_y"),
    ):
        assert key not in scrub(text).lower() and found([scrub(text)]) == frozenset(), text
    assert not found(["1" * size, f"{key}0", key[:32], f"a_{'1' * size}"])


def test_a_json_pair_that_tells_together_is_replaced_and_stays_json() -> None:
    (clean,) = cleaned([{"result_json": '{"password":"correcthorse","b":1}'}])
    assert "correcthorse" not in clean["result_json"]
    msgspec.json.decode(clean["result_json"])


@pytest.mark.parametrize("depth", [600, 5000])  # read and not searched; not even read
def test_arguments_that_are_nested_without_end_are_replaced_and_stay_json(depth: int) -> None:
    function = {"name": "f", "arguments": "[" * depth + "]" * depth}
    asked = {"id": "c", "type": "function", "function": function}
    call = Call(
        step=0,
        messages=({"role": "user", "content": "I am bob@example.com"},),
        response="",
        tool_calls=(asked,),
    )
    clean = scrubbed(row("", calls=[call_column(call)]))
    (said,) = clean["calls"][0]["completion"]
    assert said["tool_calls"][0]["function"]["arguments"] == '"[NESTED]"'


@pytest.mark.parametrize("column", ["agent_id", "trajectory_id", "scenario_id"])
def test_a_secret_in_an_id_refuses_the_row_by_rule_without_the_secret(column: str) -> None:
    with pytest.raises(ScrubError, match=r"2025-11-14T09:00 .*rule EMAIL matches") as refused:
        scrubbed(row("nothing", **{column: "bob@example.com"}))
    assert "bob" not in str(refused.value)


@pytest.mark.parametrize("digest", ["0123456789abcdef0123456789abcdef01234567", "ab" * 31 + "09"])
def test_a_digest_is_a_good_id_and_no_text_to_publish(digest: str) -> None:
    assert scrubbed(row("nothing", agent_id=digest))["agent_id"] == digest
    clean = scrubbed(row(f"the key is {digest}", agent_id=digest))
    assert clean["scrubbed"] == ["HEX_KEY"] and clean["agent_id"] == digest


def test_a_row_without_secrets_is_the_same_row() -> None:
    given = row("nothing")
    assert scrubbed(given) is given


def test_tokens_of_text_that_no_column_holds_are_not_published():
    call = Call(step=0, messages=(), response="HOLD", prompt_token_ids=(1,), unseen=True)
    assert _shown(call, Selection()).prompt_token_ids is None
    assert _shown(call, Selection(safe=False)) == call
    assert _shown(replace(call, unseen=False), Selection()).prompt_token_ids == (1,)
