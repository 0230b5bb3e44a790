"""docs/kubernetes.md: its local commands are run, the others at least name what is there."""

from __future__ import annotations

import importlib
import re
import shlex

import pytest

from k8s.manifests import Manifests
from k8s.places import PLACES, ROOT
from k8s.quantities import quantity
from k8s.references import SECRETS

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
BLOCKS = re.findall(r"^```sh ?([\w-]*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
LOCAL = [line for mark, block in BLOCKS if not mark for line in block.splitlines() if line]
MARKED = [line for mark, block in BLOCKS if mark for line in block.splitlines() if line]
TESTED_ELSEWHERE = {"python -m k8s check"}  # test_places.py


def test_blocks_are_marked_by_what_they_need() -> None:
    assert {mark for mark, _ in BLOCKS} == {"", "needs-cluster", "needs-docker", "needs-kubectl"}
    assert LOCAL
    assert not [line for line in LOCAL if not line.startswith("python -m ")]
    assert len(re.findall(r"^```", PAGE, re.MULTILINE)) == 2 * len(BLOCKS)


@pytest.mark.parametrize("line", [line for line in LOCAL if line not in TESTED_ELSEWHERE])
def test_local_command_runs(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    _, _, module, *arguments = shlex.split(line)
    assert not importlib.import_module(f"{module}.__main__").main(arguments)
    assert capsys.readouterr().out


def test_every_path_in_a_command_is_there() -> None:
    paths = {path for line in MARKED for path in re.findall(r"(?<=\s)k8s/[\w./-]+", line)}
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    for line in MARKED:
        if "apply -k" in line:
            assert (ROOT / line.split("apply -k ")[1] / "kustomization.yaml").exists()


@pytest.mark.parametrize(("name", "keys"), SECRETS.items())
def test_every_secret_that_manifests_name_is_made(name: str, keys: frozenset[str]) -> None:
    (command,) = [line for line in MARKED if f"create secret generic {name} " in line]
    made = re.findall(r"--from-file=(\S+)|--from-literal=(\w+)=", command)
    assert {file or key for file, key in made} == keys


def test_images_that_no_overlay_sets_are_to_be_set_by_hand() -> None:
    """What is applied by itself had an image that only a laptop's cluster finds."""
    applied = {path for line in MARKED for path in re.findall(r"apply -f (k8s/\S+)", line)}
    alone = {path: text for path in applied if "image: warmpath:" in (text := (ROOT / path).read_text())}
    assert alone
    images, _ = PAGE.split("## Install")[1].split("```", 1)
    (stays,) = [line for line in PAGE.splitlines() if line.startswith("| the head stays in `Init`")]
    for path, text in alone.items():
        assert f"`image:` in `{path}`" in images
        assert "the image as your registry has it" in text.split("apiVersion")[0].replace("\n# ", " ")
    assert "`ImagePullBackOff`" in stays


def test_images_are_built_under_the_names_that_overlays_use() -> None:
    built = {line.split(" -t ")[1].split()[0] for line in MARKED if line.startswith("docker build")}
    used = {
        name
        for place in PLACES.values()
        for name in re.findall(r"image: (warmpath:\S+)", place.kept.read_text())
    }
    assert used == built
    for line in MARKED:
        if line.startswith("docker build"):
            target = line.split("--target ")[1].split()[0]
            assert f" AS {target}\n" in (ROOT / "Dockerfile").read_text()


def test_every_overlay_is_described() -> None:
    rows = set(re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE))
    assert rows == {name for name, place in PLACES.items() if place.beside is None}


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)]+)\)", PAGE):
        file, _, anchor = target.partition("#")
        text = (ROOT / "docs" / file).read_text() if file else PAGE
        anchors = {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        }
        assert not anchor or anchor in anchors, target


def test_numbers_on_the_page_are_those_of_the_manifests() -> None:
    demo = [
        pod.main["resources"]["requests"]
        for pod in Manifests.parse(PLACES["cpu-demo"].kept.read_text()).pods()
    ]
    cpus, memory = (sum(quantity(each[name]) for each in demo) for name in ("cpu", "memory"))
    assert f"{cpus.normalize()} CPUs and {memory / 2**30} GiB in requests" in PAGE
    kept = PLACES["gpu"].kept.read_text()
    assert "sleeps 5 s" in PAGE
    assert '- "5"' in kept
    assert "drains for up to 140 s" in PAGE
    assert 'RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S\n              value: "140"' in kept
    for key, number in (("rayClusterDeletionDelaySeconds", 180), ("terminationGracePeriodSeconds", 150)):
        assert f"{key}: {number}" in kept
        assert re.search(rf"`{key}`[:,]? {number}", PAGE)


@pytest.mark.parametrize("line", sorted(set(re.findall(r"`python\s-m\s(\w+\s\w+)[^`]*`", PAGE))))
def test_commands_within_sentences_exist(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those are named and not run; the rest of what stands in backticks needs a cluster."""
    module, command = line.split()
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"{module}.__main__").main([command, "--help"])
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_objects_that_commands_name_are_there() -> None:
    """Also in tables: `kubectl` asks for what an overlay, an example or KubeRay makes."""
    made = {
        f"{each['kind'].lower()}/{each['metadata']['name']}"
        for place in PLACES.values()
        for each in Manifests.parse(place.kept.read_text()).objects
    }
    made |= {"service/warmpath-serve-svc", "job/fetch-model"}
    named = set(re.findall(r"\b((?:service|job|secret|configmap)/[a-z-]+)", PAGE))
    assert named
    assert named <= made
