"""What is found wrong with API keys before a cluster is started."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cache.errors import ConfigError
from deploy.preflight import check_keys
from deploy.serve_file import ServeFile
from tests.fakes.keys import entry, key_file

ROOT = Path(__file__).resolve().parents[3]


def a_file(folder: Path, **tenants: str) -> ServeFile:
    content = yaml.safe_load((ROOT / "deploy.yaml").read_text())
    content["applications"][0]["args"]["router"]["tenants"] = tenants
    (folder / "deploy.yaml").write_text(yaml.safe_dump(content))
    return ServeFile.read(folder / "deploy.yaml")


def test_keys_that_are_there_are_fine(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(key_file(entry("a")))
    (tmp_path / "secret").write_text("0123456789abcdef" * 2)
    check_keys(a_file(tmp_path, keys_file=str(tmp_path / "keys"), secret_file=str(tmp_path / "secret")))
    check_keys(a_file(tmp_path))


@pytest.mark.parametrize(
    ("keys", "secret", "field"),
    [
        (None, "0" * 32, "args.router.tenants.keys_file"),
        ("keys: [{name: a}]", "0" * 32, "keys[0].sha256"),
        ("keys: []", "short", "args.router.tenants.secret_file"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, keys: str | None, secret: str, field: str) -> None:
    if keys is not None:
        (tmp_path / "keys").write_text(keys)
    (tmp_path / "secret").write_text(secret)
    file = a_file(tmp_path, keys_file=str(tmp_path / "keys"), secret_file=str(tmp_path / "secret"))
    with pytest.raises(ConfigError) as caught:
        check_keys(file)
    assert caught.value.field == field
