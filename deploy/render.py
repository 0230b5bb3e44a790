"""deploy.yaml as a RayService carries it: what any cluster needs otherwise, then a place's own settings.

One truth: manifests hold what this writes and nothing by hand. What `check` refuses is refused here, and
so is what would come up and serve nobody. Reads and writes YAML; talks to no cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cache.errors import ConfigError
from deploy.errors import DeployFileError
from deploy.preflight import check_models
from deploy.serve_file import DEPLOYMENTS, IMPORT_PATH, ServeFile, load_mapping

NAME_KEY = "name"  # applications and deployments are told apart by it

EVERY_INTERFACE = "0.0.0.0"
NODE_ADDRESS = "node"
EVERY_NODE = "EveryNode"  # Serve's default, too

CLUSTER_SETTINGS: Mapping[str, Any] = {
    "http_options": {"host": EVERY_INTERFACE},  # a Service reaches a pod at its address, not at 127.0.0.1
    "applications": [
        {
            "args": {
                "replica": {"event_host": NODE_ADDRESS},  # Routers are in other pods than replicas
                "router": {
                    "expose_routing": False
                },  # which replica served whom is nobody's business out there
            },
        }
    ],
}


def rendered(path: Path, settings: Sequence[Path] = (), *, mounted: Path | None = None) -> ServeFile:
    """deploy.yaml for a cluster: the file, `CLUSTER_SETTINGS`, then each settings file over the one before.

    settings: mappings like deploy.yaml's own with only what differs; null removes a key, and items of
    `applications` and `deployments` are met by name. mounted: models below it are on the cluster's nodes and
    are not looked for here. Raises ServingError: whatever `check` raises, or ConfigError for what no cluster
    could use.
    """
    content = _with_cluster_settings(path, load_mapping(path))
    for each in settings:
        content = merge(content, _named(load_mapping(each), content, each))
    label = Path(" with ".join(str(each) for each in (path, *settings)))
    file = ServeFile.checked(label, content)
    _check_reachable(file)
    _check_gpus(file)
    if not _is_mounted(file, mounted):
        check_models(file)
    return file


def serve_config(file: ServeFile) -> str:
    """The file as YAML, the same text for the same content."""
    return yaml.safe_dump(file.content, sort_keys=False, width=1000)


def patch(file: ServeFile, *, service: str, command: str) -> str:
    """A kustomize patch that sets this as the RayService's `serveConfigV2`. command: how it was made."""
    config = "".join(f"    {line}\n" for line in serve_config(file).splitlines())
    return (
        f"# Written by `{command}`: change deploy.yaml or the settings, not this file.\n"
        "apiVersion: ray.io/v1\n"
        "kind: RayService\n"
        f"metadata:\n  name: {service}\n"
        f"spec:\n  serveConfigV2: |\n{config}"
    )


def merge(base: Any, change: Any) -> Any:
    """`change` over `base`: mappings key by key, null removes, lists of named mappings by name.

    Anything else is replaced. Neither argument is changed. Source: RFC 7396, but for the named lists.
    """
    if isinstance(base, Mapping) and isinstance(change, Mapping):
        # In base's order, so that a diff of what is rendered shows what changed and nothing else.
        merged = {key: merge(value, change[key]) if key in change else value for key, value in base.items()}
        merged |= {key: merge(None, value) for key, value in change.items() if key not in base}
        return {key: value for key, value in merged.items() if change.get(key, value) is not None}
    if isinstance(change, Mapping):
        return {key: merge(None, value) for key, value in change.items() if value is not None}
    if _is_named(change):
        if not _is_named(base):
            return [merge(None, item) for item in change]
        changes = {item[NAME_KEY]: item for item in change}
        kept = [merge(item, changes.pop(item[NAME_KEY], {})) for item in base]
        return kept + [merge(None, item) for item in changes.values()]
    return change


def _is_named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) and NAME_KEY in item for item in value)


def _with_cluster_settings(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Raises what a check of the file itself raises, so that the settings are laid over something whole."""
    name = ServeFile.checked(path, dict(content)).app_name
    applications = [{NAME_KEY: "default", **app} for app in content["applications"]]  # Serve's own default
    ours = [{NAME_KEY: name, **app} for app in CLUSTER_SETTINGS["applications"]]
    merged: dict[str, Any] = merge(
        {**content, "applications": applications}, {**CLUSTER_SETTINGS, "applications": ours}
    )
    return merged


def _named(change: dict[str, Any], content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The settings, once every application and deployment in them is known to exist.

    A misspelt name would add a second one, which Serve would ignore or fail on minutes later; of two items
    with one name only the last would be laid over.
    """
    if "applications" in change and change["applications"] is None:
        raise DeployFileError(path, "applications: must not be null, with which nothing would be served")
    known = {app[NAME_KEY]: app for app in content["applications"]}
    for app in _items_of(change, "applications", known, path):
        theirs = known[app[NAME_KEY]]
        is_ours = theirs.get("import_path") == IMPORT_PATH  # whose two are there also where none is mentioned
        deployments = [each[NAME_KEY] for each in theirs.get("deployments", [])]
        _items_of(app, "deployments", DEPLOYMENTS if is_ours else deployments, path)
    return change


def _items_of(
    settings: Mapping[str, Any], key: str, known: Collection[str], path: Path
) -> list[Mapping[str, Any]]:
    """The named mappings under a key of the settings. Raises DeployFileError."""
    items = settings.get(key)
    if items is None:
        return []
    names, seen = ", ".join(known), []
    if not isinstance(items, list):
        raise DeployFileError(
            path, f"{key}: must be a list, and each name must be one of {names}, not {items!r:.80}"
        )
    for item in items:
        if not isinstance(item, Mapping) or item.get(NAME_KEY) not in list(known):
            raise DeployFileError(path, f"{key}: name must be one of {names}, not {item!r:.80}")
        if item[NAME_KEY] in seen:
            raise DeployFileError(path, f"{key}: {item[NAME_KEY]} must be there once")
        seen.append(item[NAME_KEY])
    return items


def _check_reachable(file: ServeFile) -> None:
    if file.host != EVERY_INTERFACE:
        raise ConfigError(
            "http_options.host", file.host, f"must be {EVERY_INTERFACE} where a Service sends requests"
        )
    event_host = file.app.replica.event_host
    if event_host != NODE_ADDRESS:
        accepted = f"must be {NODE_ADDRESS}: Routers in other pods connect to it"
        raise ConfigError("args.replica.event_host", event_host, accepted)
    proxies = file.content.get("proxy_location", EVERY_NODE)
    if proxies != EVERY_NODE:
        accepted = f"must be {EVERY_NODE}: the Service leaves the head out, and has workers' proxies alone"
        raise ConfigError("proxy_location", proxies, accepted)


def _check_gpus(file: ServeFile) -> None:
    """`ray_actor_options` in the file replaces `deploy/app.py`'s, and with it the GPU an engine asks for."""
    options = file.options("Replica").get("ray_actor_options")
    device, num_ranks = file.app.replica.device, file.app.replica.tensor_parallel
    num_gpus = num_ranks if options is None else options.get("num_gpus", 0)
    where = "deployments.Replica.ray_actor_options.num_gpus"
    if device == "cuda" and num_gpus != num_ranks:
        accepted = f"must be {num_ranks} where device is cuda: one whole GPU for each rank of an engine"
        raise ConfigError(where, num_gpus, accepted)
    if device == "cpu" and options is not None and num_gpus:
        raise ConfigError(where, num_gpus, "must be 0 where device is cpu: nobody else could use that GPU")


def _is_mounted(file: ServeFile, mounted: Path | None) -> bool:
    model = Path(file.app.replica.model)
    return mounted is not None and model.is_absolute() and model.is_relative_to(mounted)
