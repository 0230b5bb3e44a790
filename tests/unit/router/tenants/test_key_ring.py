"""Keys change without a restart, and a broken file changes nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

import pytest

from cache.errors import ConfigError
from router.tenants import key_ring
from router.tenants.key_ring import KeyFile, KeyRing, KeyVariable, source_of
from router.tenants.settings import TenantSettings
from tests.fakes.keys import entry, key_file

ONE = key_file(entry("a"))
TWO = key_file(entry("bob"))  # of another size: the file system's clock may not tick between two writes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "keys.yaml"
    made.write_text(ONE)
    return made


def names(ring: KeyRing) -> set[str]:
    return set(ring.table.names)


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)


def settle(ring: KeyRing) -> None:
    """Looks until a change would have been taken: one look to see it, one to see it done."""
    for _ in range(3):
        ring.look()


def test_a_rewritten_file_replaces_the_keys(path: Path) -> None:
    ring = KeyRing(KeyFile(str(path)))
    path.write_text(TWO)
    settle(ring)
    assert names(ring) == {"bob"}
    assert ring.num_reloads == 1


def test_a_replaced_file_replaces_the_keys(path: Path) -> None:
    """Same size, same times: what differs is the file itself."""
    ring = KeyRing(KeyFile(str(path)))
    other = path.with_name("other")
    other.write_text(key_file(entry("b")))
    stat = path.stat()
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)
    settle(ring)
    assert names(ring) == {"b"}


def test_a_file_written_over_with_its_old_times_replaces_the_keys(path: Path) -> None:
    """As `rsync --inplace -t` leaves it. A digest is as long as any other, so the size is the same, too."""
    ring = KeyRing(KeyFile(str(path)))
    stat = path.stat()
    time.sleep(0.02)  # the file system's clock ticks every 10 ms at worst
    path.write_text(key_file(entry("b")))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    settle(ring)
    assert names(ring) == {"b"}


def test_a_swapped_link_replaces_the_keys(tmp_path: Path) -> None:
    """As Kubernetes changes a mounted secret."""
    for folder, content in (("v1", ONE), ("v2", TWO)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "keys.yaml").write_text(content)
    (tmp_path / "data").symlink_to("v1")
    ring = KeyRing(KeyFile(str(tmp_path / "data" / "keys.yaml")))
    (tmp_path / "next").symlink_to("v2")
    (tmp_path / "next").replace(tmp_path / "data")
    settle(ring)
    assert names(ring) == {"bob"}


def test_a_file_that_is_being_written_is_not_read_yet(path: Path) -> None:
    ring = KeyRing(KeyFile(str(path)))
    path.write_text("keys: []")  # the first half of something
    ring.look()
    assert names(ring) == {"a"}
    path.write_text(TWO)
    settle(ring)
    assert names(ring) == {"bob"}
    assert ring.num_reloads == 1


@pytest.mark.parametrize("broken", ["", "keys: [", "keys:\n- name: a\n  sha256: nonsense\n", None, b"\xff"])
def test_a_broken_file_keeps_the_keys_and_is_said_once(
    path: Path, broken: str | bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing(KeyFile(str(path)))
    if broken is None:
        path.unlink()
    else:
        path.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    with caplog.at_level(logging.INFO, logger="router"):
        for _ in range(5):
            settle(ring)
        assert names(ring) == {"a"}
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert ring.is_stale
        assert caplog.records[0].__dict__["detail"]
        path.write_text(ONE)  # mended, with what was there before
        settle(ring)
        assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert (names(ring), ring.num_failures, ring.num_reloads) == ({"a"}, 1, 1)
    assert not ring.is_stale


def test_a_file_that_went_and_came_back_unchanged_counts_as_mended(path: Path) -> None:
    ring = KeyRing(KeyFile(str(path)))
    away = path.rename(path.with_name("away"))
    settle(ring)
    assert ring.is_stale
    away.rename(path)
    settle(ring)
    assert (names(ring), ring.num_failures, ring.num_reloads) == ({"a"}, 1, 1)
    assert not ring.is_stale


@pytest.mark.parametrize("content", [None, "", "keys: ["])
def test_nobody_starts_with_keys_that_cannot_be_read(path: Path, content: str | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(ConfigError):
        KeyRing(KeyFile(str(path)))


def test_a_file_larger_than_any_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ring, "MAX_FILE_BYTES", 10)
    with pytest.raises(ConfigError, match="larger"):
        KeyRing(KeyFile(str(path)))


async def test_the_watch_takes_a_change_and_outlives_a_surprise(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_ring, "LOOK_INTERVAL_S", 0.001)
    ring = KeyRing(KeyFile(str(path)))
    watching = asyncio.create_task(ring.watch())
    try:
        with monkeypatch.context() as patch:
            patch.setattr(key_ring, "parse_keys", lambda _text: 1 / 0)
            rewrite(path, ONE + "\n")
            await until(lambda: ring.num_failures == 1)
        rewrite(path, TWO)
        await until(lambda: names(ring) == {"bob"})
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # a file has no event
            await asyncio.sleep(0.001)


async def test_a_variable_is_read_once() -> None:
    ring = KeyRing(KeyVariable("KEYS", {"KEYS": ONE}))
    await ring.watch()  # returns: there is nothing to follow
    assert names(ring) == {"a"}


def test_settings_say_where_keys_are(path: Path) -> None:
    assert source_of(TenantSettings(keys_file=str(path), cache_scope="shared")) == KeyFile(str(path))
    variable = source_of(TenantSettings(keys_variable="KEYS", cache_scope="shared"), {})
    with pytest.raises(ConfigError, match="is not set"):
        KeyRing(variable)


def test_no_key_at_all_is_worth_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text("keys: []")
    KeyRing(KeyFile(str(path)))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
