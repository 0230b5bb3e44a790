"""The key file: what it gives, and how it says what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from cache.errors import ConfigError
from router.tenants.api_key import MAX_KEY_BYTES, PREFIX, digest_of, new_key
from router.tenants.key_table import MAX_KEYS, ApiKey, KeyLimits, parse_keys
from tests.fakes.keys import digest, entry, key_file


def test_every_field_arrives() -> None:
    limits = {"requests_per_minute": 60, "tokens_per_minute": 1000, "max_concurrent": 2}
    table = parse_keys(key_file(entry("a", tenant="acme", operator=True, limits=limits), entry("b")))
    assert table.find(b"key of a") == ApiKey("a", "acme", True, KeyLimits(60, 1000, 2))
    assert table.find(b"key of b") == ApiKey("b", "b")  # its own tenant, no operator, no limits
    assert (len(table), table.names) == (2, {"a", "b"})


def test_a_tenants_share_and_how_urgent_a_key_may_be() -> None:
    table = parse_keys(key_file(entry("a", share=0.5, priority=-3), entry("b", share=2)))
    of_a, of_b = table.find(b"key of a"), table.find(b"key of b")
    assert of_a is not None
    assert of_b is not None
    assert (of_a.share, of_a.priority, of_b.share, of_b.priority) == (0.5, -3, 2.0, 0)


@pytest.mark.parametrize("given", [b"", b"key of c", b"key of a ", digest("key of a").encode()])
def test_what_is_no_key_is_nobodys(given: bytes) -> None:
    assert parse_keys(key_file(entry("a"))).find(given) is None


def test_a_key_longer_than_any_is_nobodys_and_is_not_hashed() -> None:
    long = "x" * (MAX_KEY_BYTES + 1)
    assert parse_keys(key_file(entry("a", long))).find(long.encode()) is None
    assert parse_keys(key_file(entry("a", long[:-1]))).find(long[:-1].encode()) is not None


def test_two_keys_work_while_one_replaces_the_other() -> None:
    table = parse_keys(key_file({"name": "a", "sha256": [digest("old"), digest("new")]}))
    assert table.find(b"old") is table.find(b"new") is not None


def test_upper_case_digests_are_digests() -> None:
    table = parse_keys(key_file({"name": "a", "sha256": digest("old").upper()}))
    assert table.find(b"old") is not None


def test_new_keys_differ_and_are_not_in_their_digests() -> None:
    first, second = new_key(), new_key()
    assert first != second
    assert first.startswith(PREFIX)
    assert len(first) >= 46  # 256 bits
    assert first.encode() not in digest_of(first.encode())


def test_no_key_at_all_is_a_table_that_opens_nothing() -> None:
    assert len(parse_keys("keys: []")) == 0


SECRET = "wp-a-key-where-its-digest-belongs"

WRONG: list[tuple[Any, str, str]] = [
    (None, "keys", "list under"),
    ([], "keys", "list under"),
    ({"keys": None}, "keys", "list under"),
    ({"keys": {}}, "keys", "list under"),
    ({"keys": [], "kyes": []}, "kyes", "use keys"),
    ({"keys": ["a"]}, "keys[0]", "mapping"),
    ({"keys": [{"sha256": digest("x")}]}, "keys[0].name", "1 to 64"),
    ({"keys": [entry("a b")]}, "keys[0].name", "1 to 64"),
    ({"keys": [entry("a" * 65)]}, "keys[0].name", "1 to 64"),
    ({"keys": [entry("a", tenant="")]}, "keys[0].tenant", "1 to 64"),
    ({"keys": [entry("a", tenant=7)]}, "keys[0].tenant", "in quotes"),
    ({"keys": [{"name": "a"}]}, "keys[0].sha256", "64 hexadecimal"),
    ({"keys": [{"name": "a", "sha256": SECRET}]}, "keys[0].sha256", "64 hexadecimal"),
    ({"keys": [{"name": "a", "sha256": [digest("x"), SECRET]}]}, "keys[0].sha256", "64 hexadecimal"),
    ({"keys": [{"name": "a", "sha256": []}]}, "keys[0].sha256", "64 hexadecimal"),
    ({"keys": [{"name": "a", "sha256": 12}]}, "keys[0].sha256", "in quotes"),
    ({"keys": [entry("a"), entry("a", "other")]}, "keys[1].name", "unique"),
    ({"keys": [entry("a"), entry("b", "key of a")]}, "keys[1].sha256", "is also a's"),
    ({"keys": [entry("a", operator="yes")]}, "keys[0].operator", "true or false"),
    ({"keys": [entry("a", key_="x")]}, "keys[0].key_", "use name, tenant"),
    ({"keys": [entry("a", share=0)]}, "keys[0].share", "between 0.01 and 100"),
    ({"keys": [entry("a", share=True)]}, "keys[0].share", "a number"),
    ({"keys": [entry("a", share=float("nan"))]}, "keys[0].share", "a number"),
    ({"keys": [entry("a", tenant="t", share=2), entry("b", tenant="t")]}, "keys[1].share", "must be 2"),
    ({"keys": [entry("a", priority=11)]}, "keys[0].priority", "between -10 and 10"),
    ({"keys": [entry("a", priority=0.5)]}, "keys[0].priority", "an integer"),
    ({"keys": [entry("a", limits=5)]}, "keys[0].limits", "mapping"),
    ({"keys": [entry("a", limits={"rpm": 5})]}, "keys[0].limits.rpm", "use requests_per_minute"),
    (
        {"keys": [entry("a", limits={"requests_per_minute": 0})]},
        "keys[0].limits.requests_per_minute",
        "between 1 and 10000000",
    ),
    (
        {"keys": [entry("a", limits={"max_concurrent": 1.5})]},
        "keys[0].limits.max_concurrent",
        "between 1 and",
    ),
    (
        {"keys": [entry("a", limits={"max_concurrent": True})]},
        "keys[0].limits.max_concurrent",
        "between 1 and",
    ),
]


@pytest.mark.parametrize(("content", "field", "accepted"), WRONG)
def test_what_is_wrong_is_named_with_its_place_and_range(content: Any, field: str, accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(yaml.safe_dump(content))
    assert caught.value.field == field
    assert accepted in caught.value.accepted
    assert SECRET not in str(caught.value)
    assert digest("x") not in str(caught.value)


@pytest.mark.parametrize(
    "text", [f"keys: [{SECRET}", f"keys:\n\t- {SECRET}", "keys: 2026-99-99", "[" * 100_000]
)
def test_what_is_no_yaml_is_refused_without_being_quoted(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(text)
    assert caught.value.field == "keys"
    assert SECRET not in str(caught.value)


def test_too_many_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"at most {MAX_KEYS}"):
        parse_keys("keys: [" + "a," * (MAX_KEYS + 1) + "]")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("keys:\n- {name: a, sha256: DIGEST}\nkeys:\n- {name: b, sha256: DIGEST}\n", 3),
        ("keys:\n- name: a\n  sha256: DIGEST\n  limits: {max_concurrent: 2}\n  limits: {}\n", 5),
        ("keys:\n- name: a\n  sha256: DIGEST\n  limits: {prefixes: 2,\n    prefixes: 4}\n", 5),
    ],
)
def test_a_key_that_is_there_twice_is_refused(text: str, line: int) -> None:
    """PyYAML takes the last: everybody of the first list would have been locked out, or had no limit."""
    with pytest.raises(ConfigError, match=rf"a key of a mapping twice, again at line {line}$"):
        parse_keys(text.replace("DIGEST", "a" * 64))


def test_the_same_key_in_two_entries_is_none_twice() -> None:
    digests = [f"{number:064x}" for number in range(3)]
    entries = "".join(f"- name: n{each[-1]}\n  sha256: ['{each}']\n  tenant: name\n" for each in digests)
    assert len(parse_keys(f"keys:\n{entries}")) == 3
