"""The overlays that are shipped: fine as they are, and derived from deploy.yaml and kustomize alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from deploy.environment import serve_environment
from deploy.ports import Ports
from deploy.render import serve_config
from k8s.check import check_all
from k8s.manifests import RAY_SERVICE, Manifests
from k8s.places import PLACES, ROOT, Place, build, can_build, digest_line, kept_text
from tests.unit.k8s.breaks import findings, shipped

PLACES_WITH_CONFIG = [place for place in PLACES.values() if place.settings]


def kept(place: Place) -> Manifests:
    return Manifests.parse(place.kept.read_text())


def test_nothing_is_wrong_with_what_is_shipped() -> None:
    assert [str(each) for each in check_all()] == []


@pytest.mark.parametrize("name", [name for name, place in PLACES.items() if place.beside is None])
def test_what_is_shipped_has_none(name: str) -> None:
    """So that a test of a mistake fails for that mistake alone."""
    assert findings(shipped(name), lambda things: None) == []


def test_every_overlay_is_known() -> None:
    """An overlay that nobody lists would be checked by nobody."""
    found = {path.parent.name for path in (ROOT / "k8s" / "overlays").glob("*/kustomization.yaml")}
    assert found == {name for name, place in PLACES.items() if place.beside is None}


@pytest.mark.parametrize("place", PLACES_WITH_CONFIG, ids=lambda place: place.name)
def test_what_reaches_the_cluster_is_deploy_yaml_with_the_settings(place: Place) -> None:
    """The one truth: through patch, kustomize and the kept copy nothing is added or lost."""
    (service,) = kept(place).of_kind(RAY_SERVICE)
    assert service["spec"]["serveConfigV2"] == serve_config(place.config())


def test_upgrade_has_the_config_of_gpu() -> None:
    services = [kept(PLACES[name]).of_kind(RAY_SERVICE)[0] for name in ("gpu", "upgrade")]
    assert services[0]["spec"]["serveConfigV2"] == services[1]["spec"]["serveConfigV2"]


@pytest.mark.parametrize("place", PLACES.values(), ids=lambda place: place.name)
def test_kept_copy_is_what_kustomize_builds(place: Place) -> None:
    if not can_build():
        assert place.kept.read_text().startswith(digest_line())  # built from these very sources, somewhere
        pytest.skip("kubectl is not installed")
    assert place.kept.read_text() == kept_text(place)
    assert Manifests.parse(build(place)) == kept(place)


def test_pods_speak_as_the_launcher_makes_processes_speak(tmp_path: Path) -> None:
    """Tests run what `make serve` runs: a variable that pods have otherwise would never have been tried."""
    local = serve_environment(Ports(8000), tmp_path, fast_proxy=True)
    of_one_machine = {
        "RAY_ADDRESS",  # KubeRay sets it
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",  # 127.0.0.1 alone
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",  # for Ctrl-C; a pod may take half a minute
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S",  # for `serve run`, which waits for the first proxy alone
        "RAY_DEDUP_LOGS_SKIP_REGEX",  # for Ctrl-C: of what a driver prints
        "RAY_SERVE_LOG_TO_STDERR",  # `kubectl logs` reads it
        "RAY_SERVE_HAPROXY_BINARY_PATH",  # in the image
        *Ports(8000).environment(),  # each pod has all ports to itself
    }
    of_one_machine |= {name for name, value in local.items() if str(tmp_path) in value}
    for place in PLACES.values():
        for pod in kept(place).pods():
            if pod.is_ray:
                environment = {each["name"]: each["value"] for each in pod.main["env"]}
                wanted = {name: value for name, value in local.items() if name not in of_one_machine}
                assert environment | wanted == environment, (
                    "k8s/base/rayservice.yaml, then `python -m k8s write`"
                )


def test_places_differ_as_they_promise() -> None:
    clusters = {
        name: service["spec"]["rayClusterConfig"]
        for name, place in PLACES.items()
        for service in kept(place).of_kind(RAY_SERVICE)
    }
    assert "gcsFaultToleranceOptions" not in clusters["gpu"]
    assert clusters["ha"]["gcsFaultToleranceOptions"]["redisAddress"] == "warmpath-redis:6379"
    assert clusters["ha-embedded"]["gcsFaultToleranceOptions"]["backend"] == "rocksdb"
    assert not clusters["cpu-demo"].get("enableInTreeAutoscaling")
    for name in ("gpu", "ha", "ha-embedded", "upgrade"):
        assert clusters[name]["enableInTreeAutoscaling"]
        engines = next(pod for pod in kept(PLACES[name]).pods() if pod.group == "engines")
        assert engines.main["resources"]["limits"]["nvidia.com/gpu"] == "1"
    routers = next(pod for pod in kept(PLACES["ha"]).pods() if pod.group == "routers")
    assert routers.spec["topologySpreadConstraints"][0]["whenUnsatisfiable"] == "DoNotSchedule"
    config = PLACES["ha"].config()
    assert config.content["applications"][0]["deployments"][0]["num_replicas"] >= 2


def test_only_the_autoscaler_gets_a_token_of_the_kubernetes_api() -> None:
    for place in PLACES.values():
        for pod in kept(place).pods():
            mounts = [mount["mountPath"] for each in pod.spec["containers"] for mount in each["volumeMounts"]]
            assert not any("serviceaccount" in path for path in mounts), (place.name, pod.owner)
    (service,) = kept(PLACES["gpu"]).of_kind(RAY_SERVICE)
    options = service["spec"]["rayClusterConfig"]["autoscalerOptions"]
    assert "kubernetes-api" in [mount["name"] for mount in options["volumeMounts"]]


def test_every_pod_has_the_account_that_a_registrys_secret_goes_into() -> None:
    texts = [place.kept.read_text() for place in PLACES.values()]
    texts += [path.read_text() for path in (ROOT / "k8s" / "examples").glob("*.yaml")]
    pods = [pod for text in texts for pod in Manifests.parse(text).pods()]
    assert {pod.spec["serviceAccountName"] for pod in pods} == {"warmpath"}
    assert {"headgroup", "engines", "routers", "warmpath-redis", "fetch-model"} == {pod.group for pod in pods}


def test_demo_is_closed_because_it_has_no_keys() -> None:
    assert not PLACES["cpu-demo"].config().app.tenants.has_keys
    for policy in kept(PLACES["cpu-demo"]).of_kind("NetworkPolicy"):
        for rule in policy["spec"].get("ingress", ()):
            assert rule["from"], policy["metadata"]["name"]


def test_settings_files_hold_only_what_differs() -> None:
    """A setting equal to deploy.yaml's would stand still when deploy.yaml moves."""
    for place in PLACES_WITH_CONFIG:
        for index, path in enumerate(place.settings):
            without = Place(place.name, place.settings[:index] + place.settings[index + 1 :])
            assert without.settings == () or serve_config(without.config()) != serve_config(place.config()), (
                path
            )
            assert yaml.safe_load((ROOT / path).read_text())
