"""The gate: who passes, within which limits, and what it remembers of whom."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from router.errors import InvalidApiKey, InvalidField, NotPermitted, RateLimitExceeded
from router.tenants.gate import Gate
from router.tenants.key_ring import KeyFile, KeyRing
from tests.fakes.keys import entry, key_file


class Setting:
    """A gate over a key file, with a clock and a number of Routers to turn."""

    def __init__(self, path: Path, *entries: dict[str, Any], num_routers: int = 1) -> None:
        self.path = path
        self.now = 100.0
        self.rank, self.num_routers = 0, num_routers
        path.write_text(key_file(*entries))
        self.ring = KeyRing(KeyFile(str(path)))
        self.gate = Gate(self.ring, peers=lambda: (self.rank, self.num_routers), clock=lambda: self.now)

    def rewrite(self, *entries: dict[str, Any]) -> None:
        self.path.write_text(key_file(*entries))
        for _ in range(3):
            self.ring.look()

    def enter(self, name: str = "a") -> Any:
        return self.gate.enter(self.gate.authenticate([f"Bearer key of {name}".encode()], "/v1/completions"))

    def refusals(self, why: str) -> int:
        return self.gate.statistics().refusals[why]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


@pytest.mark.parametrize("given", [b"Bearer key of a", b"bearer key of a", b"BEARER  key of a "])
def test_a_key_opens_the_api(path: Path, given: bytes) -> None:
    gate = Setting(path, entry("a")).gate
    for page in ("/v1/chat/completions", "/v1/models", "/tokenize", "/version", "/v1/not/there/yet"):
        assert gate.authenticate([given], page).name == "a"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "missing"),
        ([b""], "missing"),
        ([b"key of a"], "missing"),
        ([b"Basic key of a"], "missing"),
        ([b"Bearer key of a", b"Bearer key of a"], "missing"),  # whose it is depends on who reads it
        ([b"Bearer"], "unknown"),
        ([b"Bearer "], "unknown"),
        ([b"Bearer key of b"], "unknown"),
        ([b"Bearer \xff\x00"], "unknown"),
        ([b"Bearer " + b"x" * 100_000], "unknown"),
    ],
)
def test_nothing_else_does(path: Path, given: list[bytes], why: str) -> None:
    setting = Setting(path, entry("a"))
    with pytest.raises(InvalidApiKey) as caught:
        setting.gate.authenticate(given, "/v1/models")
    assert "key of" not in str(caught.value)
    assert setting.refusals(why) == 1


@pytest.mark.parametrize(
    "page", ["/metrics", "/debug/route", "/dashboard", "/v1", "/", "/not/there/yet", "/versions"]
)
def test_what_is_not_the_api_is_for_operators(path: Path, page: str) -> None:
    setting = Setting(path, entry("a"), entry("o", operator=True))
    assert setting.gate.authenticate([b"Bearer key of o"], page).name == "o"
    with pytest.raises(NotPermitted):
        setting.gate.authenticate([b"Bearer key of a"], page)
    assert setting.refusals("not_permitted") == 1


def test_a_browser_sends_an_operators_key_as_a_password(path: Path) -> None:
    gate = Setting(path, entry("a"), entry("o", operator=True)).gate
    basic = {name: b"Basic " + base64.b64encode(f"me:key of {name}".encode()) for name in "ao"}
    for page in ("/dashboard", "/dashboard/data"):
        assert gate.authenticate([basic["o"]], page).name == "o"
        with pytest.raises(NotPermitted):
            gate.authenticate([basic["a"]], page)
    for header, page in (
        (basic["o"], "/metrics"),
        (basic["o"], "/dashboards"),
        (basic["a"], "/v1/models"),
        (b"Basic key of o", "/dashboard"),
        (b"Basic \xff", "/dashboard"),
        (b"Basic", "/dashboard"),
    ):
        with pytest.raises(InvalidApiKey):
            gate.authenticate([header], page)


def test_a_key_that_left_the_file_opens_nothing(path: Path) -> None:
    setting = Setting(path, entry("a"), entry("b"))
    visit = setting.enter("a")
    setting.rewrite(entry("b"))
    with pytest.raises(InvalidApiKey):
        setting.enter("a")
    setting.enter("b")
    visit.close()  # what was running goes on
    assert setting.gate.statistics().num_keys == 1


def test_requests_per_minute(path: Path) -> None:
    setting = Setting(path, entry("a", limits={"requests_per_minute": 3}))
    for _ in range(3):
        setting.enter().close()
    with pytest.raises(RateLimitExceeded, match="3 requests per minute") as caught:
        setting.enter()
    assert caught.value.retry_after_s == pytest.approx(20.0)
    setting.now += 20.01
    setting.enter()
    assert setting.refusals("requests_limit") == 1


def test_prompts_at_a_time(path: Path) -> None:
    setting = Setting(path, entry("a", limits={"max_concurrent": 3}))
    first, second = setting.enter(), setting.enter()
    second.charge(2, 10)  # a batch of two prompts
    with pytest.raises(RateLimitExceeded, match="3 prompts at a time"):
        setting.enter()
    with pytest.raises(RateLimitExceeded):
        first.charge(2, 10)
    second.close()
    second.close()
    first.charge(3, 10)
    first.close()
    for _ in range(3):
        setting.enter()
    assert setting.refusals("concurrency_limit") == 2


def test_a_batch_for_which_there_is_never_room_is_not_told_to_try_again(path: Path) -> None:
    """It was a 429 with `retry-after: 1`, for ever: clients' libraries tried it again and again."""
    setting = Setting(path, entry("a", limits={"max_concurrent": 4, "tokens_per_minute": 600}))
    visit = setting.enter()
    with pytest.raises(InvalidField, match=r"at most 4 prompts with this API key.*this one has 5") as caught:
        visit.charge(5, 10)
    assert (caught.value.param, caught.value.code) == ("prompt", "invalid_value")
    assert visit.headers()["x-ratelimit-remaining-tokens"] == "600"
    visit.close()
    setting.num_routers = 2
    setting.now += 1.5
    with pytest.raises(InvalidField, match=r"at most 2 prompts .*\(4, shared by 2 Routers\)"):
        setting.enter().charge(3, 10)
    setting.enter()
    with pytest.raises(RateLimitExceeded):
        setting.enter()
    assert setting.refusals("concurrency_limit") == 1


def test_tokens_per_minute_count_prompts_before_and_answers_after(path: Path) -> None:
    setting = Setting(path, entry("a", limits={"tokens_per_minute": 600}))
    visit = setting.enter()
    visit.charge(1, 500)
    visit.spend(160)  # 60 more than there were
    with pytest.raises(RateLimitExceeded, match="600 tokens per minute") as caught:
        setting.enter()
    assert caught.value.retry_after_s == pytest.approx(6.1)
    setting.now += 6.2
    late = setting.enter()
    with pytest.raises(RateLimitExceeded):
        late.charge(1, 100)
    setting.now += 10.0
    late.charge(1, 100)


def test_a_prompt_of_more_than_a_minutes_tokens_waits_for_a_whole_minute(path: Path) -> None:
    setting = Setting(path, entry("a", limits={"tokens_per_minute": 600}))
    setting.enter().charge(1, 1200)
    with pytest.raises(RateLimitExceeded) as caught:
        setting.enter()
    assert caught.value.retry_after_s == pytest.approx(60.1)
    setting.now += 121.0
    setting.enter().charge(1, 1200)


def test_what_failed_for_nothing_is_given_back_once(path: Path) -> None:
    setting = Setting(path, entry("a", limits={"tokens_per_minute": 600}))
    visit = setting.enter()
    visit.charge(1, 600)
    visit.refund()
    visit.refund()
    setting.enter().charge(1, 600)
    with pytest.raises(RateLimitExceeded):
        setting.enter()


def test_a_key_without_limits_has_none(path: Path) -> None:
    setting = Setting(path, entry("a"))
    for _ in range(1000):
        setting.enter().charge(64, 1_000_000)
    assert setting.enter().headers() == {}


def test_each_router_enforces_its_part(path: Path) -> None:
    limits = {"requests_per_minute": 60, "max_concurrent": 4}
    setting = Setting(path, entry("a", limits=limits), num_routers=2)
    visits = [setting.enter(), setting.enter()]
    with pytest.raises(RateLimitExceeded):
        setting.enter()
    assert visits[0].headers()["x-ratelimit-limit-requests"] == "60"
    assert visits[0].headers()["x-ratelimit-remaining-requests"] == "56"  # 28 here, as many there
    setting.num_routers = 1
    setting.now += 1.5
    setting.enter()
    setting.num_routers = 8  # more Routers than prompts: one each
    setting.now += 1.5
    for visit in visits:
        visit.close()
    with pytest.raises(RateLimitExceeded):
        setting.enter()


def test_what_does_not_divide_is_the_first_routers(path: Path) -> None:
    """And goes to another one when that is the first."""
    setting = Setting(path, entry("a", limits={"max_concurrent": 3}), num_routers=2)
    setting.rank = 1
    setting.enter()
    with pytest.raises(RateLimitExceeded, match="3 prompts at a time"):
        setting.enter()
    setting.rank = 0
    setting.now += 1.5
    setting.enter()


def test_other_limits_hold_from_the_next_request_on(path: Path) -> None:
    """What was used up stays used up: nobody gets a new minute by having the file touched."""
    setting = Setting(path, entry("a", limits={"requests_per_minute": 10}))
    for _ in range(10):
        setting.enter()
    setting.rewrite(entry("a", "key of a", limits={"requests_per_minute": 1000}))
    with pytest.raises(RateLimitExceeded):
        setting.enter()
    setting.now += 0.5
    for _ in range(8):
        setting.enter()
    setting.rewrite(entry("a"))
    for _ in range(100):
        setting.enter()


def test_limits_go_by_name_so_that_a_new_key_is_no_new_minute(path: Path) -> None:
    setting = Setting(path, entry("a", limits={"requests_per_minute": 1}))
    setting.enter()
    setting.rewrite(entry("a", "other", limits={"requests_per_minute": 1}))
    key = setting.gate.authenticate([b"Bearer other"], "/v1/models")
    with pytest.raises(RateLimitExceeded):
        setting.gate.enter(key)


def test_nothing_is_kept_of_keys_that_are_gone_or_never_were(path: Path) -> None:
    setting = Setting(path, *(entry(f"k{index}") for index in range(50)))
    for index in range(50):
        setting.enter(f"k{index}")
    assert len(setting.gate._allowances) == 50
    setting.rewrite(entry("a"))
    setting.enter()
    for index in range(50):
        with pytest.raises(InvalidApiKey):
            setting.enter(f"k{index}")
    assert set(setting.gate._allowances) == {"a"}


def test_headers_that_clients_read(path: Path) -> None:
    limits = {"requests_per_minute": 60, "tokens_per_minute": 60_000}
    setting = Setting(path, entry("a", limits=limits))
    visit = setting.enter()
    visit.charge(1, 30_000)
    visit.spend(60_000)
    assert visit.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "60000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m30s",
    }
