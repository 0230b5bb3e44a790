"""Who shares a salt with whom: the table of `cache_salts.py`, row by row."""

from __future__ import annotations

import hashlib
import hmac
import itertools

import pytest

from router.tenants.cache_salts import CacheSalts
from router.tenants.settings import CacheScope

SECRET = b"0123456789abcdef" * 2
ASKED = [None, "x", "y", "\ud800"]
TENANTS = ["", "a", "b"]


def test_shared_is_what_the_body_says() -> None:
    salts = CacheSalts()
    assert [salts.salt(tenant, None) for tenant in TENANTS] == ["", "", ""]
    assert salts.salt("a", "x") == salts.salt("b", "x") == "x"


def test_tenants_meet_nobody_else_and_divide_their_own() -> None:
    salts = CacheSalts(CacheScope.TENANT, SECRET)
    made = {(tenant, asked): salts.salt(tenant, asked) for tenant in TENANTS for asked in ASKED}
    assert len(set(made.values())) == len(made)
    assert all(salts.salt(tenant, asked) == salt for (tenant, asked), salt in made.items())
    assert all(len(salt) == 64 for salt in made.values())


def test_names_and_salts_do_not_run_into_each_other() -> None:
    salts = CacheSalts(CacheScope.TENANT, SECRET)
    pairs = [("ab", "c"), ("a", "bc"), ("abc", None), ("a\0", "bc"), ("a", "\0bc")]
    assert len({salts.salt(tenant, asked) for tenant, asked in pairs}) == len(pairs)


def test_nobody_without_the_secret_can_compute_a_salt() -> None:
    made = {CacheSalts(CacheScope.TENANT, secret).salt("a", None) for secret in (SECRET, SECRET[::-1])}
    plain = {"a", hashlib.sha256(b"a").hexdigest(), hmac.digest(b"", b"a", "sha256").hex()}
    assert len(made) == 2
    assert not made & plain


def test_routers_with_one_secret_agree_for_ever() -> None:
    """Another value makes every cached prefix unknown to Routers of the old one."""
    salt = CacheSalts(CacheScope.TENANT, SECRET).salt("alice", "x")
    message = b"warmpath cache salt 1" + b"\5\0\0\0alice" + b"\1\0\0\0x"
    assert salt == hmac.new(SECRET, message, hashlib.sha256).hexdigest()


def test_a_request_shares_with_none_unless_it_says_with_which() -> None:
    numbers = itertools.count()
    salts = CacheSalts(CacheScope.REQUEST, SECRET, draw=lambda: f"drawn {next(numbers)}")
    assert salts.salt("a", None) != salts.salt("a", None)
    assert salts.salt("a", "x") == salts.salt("a", "x")
    assert salts.salt("a", "x") != salts.salt("b", "x")


def test_drawn_salts_are_new_every_time() -> None:
    salts = CacheSalts(CacheScope.REQUEST, SECRET)
    assert len({salts.salt("a", None) for _ in range(100)}) == 100


@pytest.mark.parametrize("scope", [CacheScope.TENANT, CacheScope.REQUEST])
@pytest.mark.parametrize("secret", [None, b""])
def test_there_are_no_salts_without_a_secret(scope: CacheScope, secret: bytes | None) -> None:
    with pytest.raises(AssertionError, match="without a secret"):
        CacheSalts(scope, secret)
