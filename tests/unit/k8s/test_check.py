"""Files that are not what they are to be: told by file, thing and place, and what can be judged is."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from k8s import check, places
from k8s.__main__ import main
from k8s.places import ROOT
from tests.unit.k8s.breaks import Break, cluster, container, drop, findings, group, shipped, worker

NULLS: list[tuple[Break, str]] = [
    (lambda t: container(t, 1).update(resources=None), "cpu needs a request and a limit"),
    (lambda t: container(t, 1).update(env=None), "env RAY_AUTH_MODE is None"),
    (lambda t: container(t, 1).update(volumeMounts=None), "volumes: nobody mounts 'tmp'"),
    (lambda t: worker(t, 1).update(volumes=None), "volumeMounts: no volume is called 'tmp'"),
    (lambda t: group(t, 1).update(rayStartParams=None), "object-store-memory is 0"),
    (lambda t: cluster(t).update(gcsFaultToleranceOptions=None, workerGroupSpecs=None), "places for 0"),
]
SHAPES: list[tuple[Break, str]] = [
    (lambda t: t.update(x=["x"]), "x: object 12: the object: ['x'] is not of type 'object'"),
    (lambda t: t.update(x={"kind": "Service"}), "x: Service/?: the object: 'metadata' is a required"),
    (
        lambda t: t["Service/warmpath-metrics"].update(metadata=["name"]),
        "x: Service/?: metadata: ['name'] is not of type 'object'",
    ),
    (lambda t: drop(t["Service/warmpath-metrics"], "spec"), "'spec' is a required"),
    (lambda t: t["Service/warmpath-metrics"].update(kind="../Service"), "does not match"),
    (lambda t: worker(t, 1).update(containers=[]), "workerGroupSpecs.1.template.spec.containers: [] "),
    (
        lambda t: drop(group(t, 1)["template"], "spec"),
        "x: RayService/warmpath: spec.rayClusterConfig.workerGroupSpecs.1.template: 'spec' is a required",
    ),
    (
        lambda t: container(t, 1)["resources"]["limits"].update(cpu="two"),
        "containers.0.resources.limits.cpu: 'two' must be a quantity, as 500m or 2Gi",
    ),
    (
        lambda t: container(t, 1)["env"].append(
            {"name": "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "value": "soon"}
        ),
        "value: 'soon' must be a number of seconds",
    ),
    (
        lambda t: t["NetworkPolicy/namespace-to-serve"]["spec"]["ingress"][0]["ports"][0].update(
            endPort=70000
        ),
        "endPort: 70000 is greater than the maximum of 65535",
    ),
    (
        lambda t: drop(t["RayService/warmpath"]["spec"], "serveConfigV2"),
        "spec: 'serveConfigV2' is a required",
    ),
    (
        lambda t: t["RayService/warmpath"]["spec"].update(serveConfigV2="applications: 2020-13-45"),
        "RayService/serveConfigV2: '2020-13-45' is not what",
    ),
]


@pytest.mark.parametrize(("change", "words"), NULLS)
def test_null_is_a_field_left_out(change: Break, words: str) -> None:
    told = findings(shipped("cpu-demo"), change)
    assert any(words in each for each in told), told


def test_null_where_nothing_has_to_be_is_fine() -> None:
    told = findings(
        shipped("cpu-demo"), lambda t: worker(t, 1).update(securityContext=None, tolerations=None)
    )
    assert told == []


@pytest.mark.parametrize(("change", "words"), SHAPES)
def test_a_wrong_shape_is_told_with_its_place(change: Break, words: str) -> None:
    told = findings(shipped("cpu-demo"), change)
    assert any(words in each for each in told), told


def test_what_is_broken_is_not_judged_and_the_others_are_alone() -> None:
    """Nothing is said of what refers to it: it may be there once it is mended."""

    def broken(things: dict[str, dict[str, Any]]) -> None:
        things["Service/warmpath-metrics"]["spec"]["ports"] = 7
        worker(things, 1)["hostNetwork"] = True

    ports, network = sorted(findings(shipped("cpu-demo"), broken), reverse=True)
    assert "Service/warmpath-metrics: spec.ports: 7 is not of type 'array'" in ports
    assert "hostNetwork must not be set" in network


def test_an_unknown_kind_is_told_and_the_rest_judged() -> None:
    def unknown(things: dict[str, dict[str, Any]]) -> None:
        metadata = {"name": "x", "namespace": "warmpath"}
        things["x"] = {"apiVersion": "cert-manager.io/v1", "kind": "Certificate", "metadata": metadata}
        drop(things, "NetworkPolicy/deny-all")

    told = findings(shipped("cpu-demo"), unknown)
    assert told[0] == "x: Certificate/x: apiVersion: no Certificate in cert-manager.io/v1 of Kubernetes 1.32"
    assert any("no NetworkPolicy closes it by default" in each for each in told[1:])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"a: 1\n b: 2", "a.yaml: cannot be read: .*line 2"),
        (b"\xe4: 1", "a.yaml: cannot be read: .*invalid"),
        (b"kind: a\nkind: b", "a.yaml: cannot be read: .*the key 'kind' is there twice.*line 2"),
        (b"- a", r"object 1: the object: \['a'\] is not of type 'object'"),
        (
            b"kind: List\napiVersion: v1\nitems: [{kind: Pod}]",
            "Pod/[?]: the object: 'apiVersion' is a required",
        ),
    ],
)
def test_a_file_that_holds_something_else(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(text)
    told = "\n".join(str(each) for each in check._of_files("examples/a.yaml", path))
    assert re.match(f"(?s)examples/a.yaml: {said}", told), told


def test_a_command_over_broken_files_ends_with_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of its own file, and once: who refers to `gpu` has nothing more to say of it."""
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s", ignore=shutil.ignore_patterns("__pycache__"))
    here = tmp_path / "k8s"
    monkeypatch.setattr(places, "HERE", here)
    monkeypatch.setattr(check, "EXAMPLES", here / "examples")
    monkeypatch.setattr(check, "can_build", lambda: False)
    used = {name: place for name, place in places.PLACES.items() if name != "cpu-demo"}  # needs no model
    monkeypatch.setattr(check, "PLACES", used)
    first, _, rest = (here / "rendered" / "gpu.yaml").read_text().partition("\n")
    (here / "rendered" / "gpu.yaml").write_text(f"{first}\nkind: [\n{rest}")
    (here / "rendered" / "ha.yaml").unlink()
    (here / "overlays" / "ha-embedded" / "serve-config.yaml").write_bytes(b"\xff")
    path = here / "rendered" / "upgrade.yaml"
    path.write_text(path.read_text().replace("minReplicas: 1", "minReplicas: one", 1))
    assert main(["check"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert any(each.startswith("gpu: gpu.yaml: cannot be read: ") for each in told)
    assert any("rendered/ha.yaml: was not built" in each for each in told)
    assert any("ha-embedded: serve-config.yaml: is not what deploy.yaml says" in each for each in told)
    assert any("minReplicas: 'one' is not of type 'integer'" in each for each in told)
    assert not any(each.startswith(("monitoring: RayService", "examples/")) for each in told)
