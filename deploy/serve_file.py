"""deploy.yaml as Ray Serve reads it, with the typos that Serve accepts in silence refused.

Reads and writes one file; starts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    LoggingConfig,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
    gRPCOptionsSchema,
)

from cache.errors import HIDDEN, ConfigError
from cache.host_name import HOST_FORM, is_host
from deploy import strict_yaml
from deploy.agreement import check_agreement
from deploy.config import AppConfig
from deploy.errors import DeployFileError, UnknownKey
from deploy.router_settings import over_app
from deploy.router_variable import ROUTER_VARIABLE
from deploy.scaling_options import check_scaling, replica_bounds
from router.ingress import ONE_LOOP_VARIABLE

IMPORT_PATH = "deploy.app:build"
DEFAULT_NAME = "default"  # Serve's, of an application that has none
DEPLOYMENTS = ("Router", "Replica")  # as `deploy/app.py` names them
HIGHEST_PORT = 65535
MOST_IDLE_S = (1 << 31) // 1000  # HAProxy counts milliseconds, and starts with no more
NO_PROXY = "Disabled"
MOST = (1 << 31) - 1  # of whatever is counted: Serve's messages have no room for more
COUNTS = ("max_ongoing_requests", "max_queued_requests")


@dataclass(frozen=True, slots=True)
class ServeFile:
    """One deploy.yaml, checked."""

    path: Path
    content: dict[str, Any]
    app: AppConfig
    app_name: str
    route_prefix: str  # of every path that is served
    host: str
    port: int
    num_replicas: int  # lower bound when autoscaling
    application: Mapping[str, Any]  # ours in `content`, with numbers where Serve takes text for them

    @classmethod
    def read(cls, path: Path) -> ServeFile:
        """Raises DeployFileError, UnknownKey or ConfigError; nothing has been started then."""
        return cls.checked(path, load_mapping(path))

    @classmethod
    def checked(cls, path: Path, content: dict[str, Any]) -> ServeFile:
        """The same for content that is no file, or not yet; `path` is what errors call it."""
        _refuse_typos(_mapping(path, content))
        _require_mappings(content)
        try:
            schema = ServeDeploySchema.model_validate(content)
        except ValidationError as error:
            raise _named_error(error.errors()[0], content) from None
        # Some of its checks take a value's type for granted, and it imports a request router's class.
        except (AttributeError, TypeError, ImportError) as error:
            raise DeployFileError(path, f"is not what Serve reads: {error}") from None
        _check_port(schema.http_options.port)
        application = _our_application(path, _with_numbers(content, schema))
        _check_way_in(content, application)
        _check_listener(content.get("http_options") or {})
        _check_times(schema.http_options)
        _check_capacity(schema.target_capacity)
        _check_deployments(application)
        _check_environments(application)
        _check_resources(application)
        _require_one_loop(application)
        app = AppConfig.from_args(application.get("args") or {})
        overrides, where = _router_variable(application, ROUTER_VARIABLE)
        if overrides is not None:
            app = over_app(app, overrides, where)
        _require_gpus(application, app.replica.device, app.replica.tensor_parallel)
        _check_numbers(application)
        replicas = options_of(application, "Replica")
        routers, where = options_of(application, "Router"), f"{_place_of(application)}.deployments"
        check_agreement(app.router_sketch(), app.replica, replicas, routers, where)
        return cls(
            path=path,
            content=content,
            app=app,
            app_name=application.get("name", DEFAULT_NAME),
            route_prefix=application.get("route_prefix", "/"),
            host=schema.http_options.host,
            port=schema.http_options.port,
            num_replicas=replica_bounds(replicas)[0],
            application=application,
        )

    def options(self, deployment: str) -> Mapping[str, Any]:
        """Serve's options of one deployment as the file gives them, numbers as Serve reads them; empty if it
        is not mentioned."""
        return options_of(self.application, deployment)

    def with_port(self, port: int) -> dict[str, Any]:
        """The file's content, listening on another port."""
        return {**self.content, "http_options": {**self.content.get("http_options", {}), "port": port}}


def load_mapping(path: Path) -> dict[str, Any]:
    """A YAML file that holds one mapping. Raises DeployFileError."""
    try:
        content = strict_yaml.load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeployFileError(path, error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise DeployFileError(path, f"must be text in UTF-8: {error}") from None
    except yaml.YAMLError as error:
        raise DeployFileError(path, f"not YAML: {error}") from None
    return _mapping(path, content)


def _mapping(path: Path, content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise DeployFileError(path, "must be a mapping, as deploy.yaml is")
    return content


def _require_mappings(content: Mapping[str, Any]) -> None:
    """Serve's schema asks items of these lists for their keys before it asks what they are."""
    applications = content.get("applications")
    for index, application in enumerate(applications if isinstance(applications, list) else ()):
        where = f"applications.{_name_of(application, index)}"
        if not isinstance(application, Mapping):
            raise ConfigError(where, application, "must be a mapping of settings")
        deployments = application.get("deployments")
        for number, each in enumerate(deployments if isinstance(deployments, list) else ()):
            if not isinstance(each, Mapping):
                raise ConfigError(f"{where}.deployments.{number}", each, "must be a mapping of settings")


def _named_error(error: Any, content: Any) -> ConfigError:
    """What Serve's schema refuses: by the keys and names of the file, with its value."""
    parts, value = [], content
    for key in error["loc"]:
        if isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
            parts.append(_name_of(value, key))
        elif isinstance(value, Mapping):
            value = value.get(key)
            parts.append(str(key))
        else:  # a part of Serve's type, not of the file
            break
    shown = _outline(value)
    return ConfigError(".".join(parts) or "deploy.yaml", shown, error["msg"].removeprefix("Value error, "))


def _outline(value: Any) -> Any:
    """Of what holds settings their names alone: some of the settings below may be secrets."""
    if isinstance(value, Mapping):
        return [str(key) for key in value]
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return [_name_of(item, index) for index, item in enumerate(value)]
    return value


def _name_of(item: Any, index: int) -> str:
    """How the file calls an item of a list, or Serve an application without a name."""
    if not isinstance(item, Mapping):
        return str(index)
    return str(item.get("name", DEFAULT_NAME if "import_path" in item else index))


def _place_of(application: Mapping[str, Any]) -> str:
    """What errors call it."""
    return f"applications.{application.get('name', DEFAULT_NAME)}"


def _check_port(port: int) -> None:
    if not 1 <= port <= HIGHEST_PORT:
        raise ConfigError("http_options.port", port, f"must be between 1 and {HIGHEST_PORT}")


def _check_way_in(content: Mapping[str, Any], application: Mapping[str, Any]) -> None:
    """Serve would start all of it, and nobody could ask."""
    if content.get("proxy_location") == NO_PROXY:
        raise ConfigError("proxy_location", NO_PROXY, "must be EveryNode or HeadOnly: all is asked over HTTP")
    prefix = application.get("route_prefix", "/")
    is_path = isinstance(prefix, str) and prefix.startswith("/") and not prefix.endswith("/")
    if prefix != "/" and not is_path:
        where = f"{_place_of(application)}.route_prefix"
        raise ConfigError(where, prefix, "must be /, or a path such as /llm without a / behind it")


def _check_listener(options: Mapping[str, Any]) -> None:
    """It listens where the file says, and as it says."""
    host = options.get("host", "0.0.0.0")
    if not isinstance(host, str):  # Serve takes YAML's binary for text
        raise ConfigError("http_options.host", host, HOST_FORM)
    if not host.strip():
        needed = "must be an address: Serve takes none for all of this machine's, which 0.0.0.0 says"
        raise ConfigError("http_options.host", host, needed)
    if not is_host(host):
        raise ConfigError("http_options.host", host, HOST_FORM)
    for key, value in options.items():
        if key.startswith("ssl_") and value:
            # HAProxy listens without it, and asks Routers that speak it without it: errors, in the clear.
            needed = "must be left out: Serve's fast proxy knows no TLS, which ends at your ingress"
            raise ConfigError(f"http_options.{key}", HIDDEN if "password" in key else value, needed)


def _check_times(options: HTTPOptionsSchema) -> None:
    """Serve takes any number. Below 0 it is no limit to one proxy, and at once to the other."""
    limit_s, idle_s = options.request_timeout_s, options.keep_alive_timeout_s
    if limit_s is not None and not 0.0 < limit_s < math.inf:
        needed = "must be seconds above 0, or left out: nothing ends requests then"
        raise ConfigError("http_options.request_timeout_s", limit_s, needed)
    if not 1 <= idle_s <= MOST_IDLE_S:
        raise ConfigError("http_options.keep_alive_timeout_s", idle_s, f"must be between 1 and {MOST_IDLE_S}")


def _check_capacity(percent: float | None) -> None:
    """It scales every number of replicas that the file says, and whoever starts them waits for those."""
    if percent is not None and percent < 100:
        needed = "must be left out, or 100: num_replicas says how many there are"
        raise ConfigError("target_capacity", percent, needed)


def _check_deployments(application: Mapping[str, Any]) -> None:
    """Serve finds a name that nobody has when it deploys, and of two with one name takes the last."""
    where = f"{_place_of(application)}.deployments"
    names = [each["name"] for each in application.get("deployments") or ()]
    for name in names:
        if name not in DEPLOYMENTS:
            raise UnknownKey(where, name, DEPLOYMENTS)
        if names.count(name) > 1:
            raise ConfigError(f"{where}.{name}", names.count(name), "must be there once")
    for each in application.get("deployments") or ():
        if each.get("user_config") is not None:
            needed = f"is read by nobody: settings are in args, and Routers have {ROUTER_VARIABLE}"
            raise ConfigError(f"{where}.{each['name']}.user_config", each["user_config"], needed)
        routing = each.get("request_router_config")
        if routing is not None and not routing.get("request_router_class"):
            # Serve replaces `deploy/app.py`'s whole, and takes its own class where none is named.
            needed = "must name a request_router_class where it is set: Serve's own knows no prefixes"
            raise ConfigError(f"{where}.{each['name']}.request_router_config", routing, needed)


def _check_numbers(application: Mapping[str, Any]) -> None:
    """Serve takes any integer in a file, and cannot tell its controller of it."""
    for name in DEPLOYMENTS:
        options = options_of(application, name)
        replicas = "autoscaling_config.max_replicas" if options.get("autoscaling_config") else "num_replicas"
        numbers = {replicas: max(replica_bounds(options))}
        numbers |= {key: options[key] for key in COUNTS if options.get(key) is not None}
        for key, number in numbers.items():
            if number > MOST:
                where = f"{_place_of(application)}.deployments.{name}.{key}"
                shown = number if number < 10**20 else "a number of more than twenty digits"
                raise ConfigError(where, shown, f"must be at most {MOST}")


def _our_application(path: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    ours = [app for app in content.get("applications", []) if app.get("import_path") == IMPORT_PATH]
    if len(ours) != 1:
        raise DeployFileError(path, f"needs exactly one application with import_path {IMPORT_PATH}")
    application: Mapping[str, Any] = ours[0]
    return application


def _check_environments(application: Mapping[str, Any]) -> None:
    """Ray takes text alone, and says so when the application is built: YAML's 0 is a number."""
    name = _place_of(application)
    places = {f"{name}.runtime_env": application.get("runtime_env")}
    for each in application.get("deployments", []):
        options = each.get("ray_actor_options") or {}
        places[f"{name}.deployments.{each['name']}.ray_actor_options.runtime_env"] = options.get(
            "runtime_env"
        )
    for where, runtime_env in places.items():
        variables = (runtime_env or {}).get("env_vars")
        if variables is not None and not isinstance(variables, Mapping):
            raise ConfigError(f"{where}.env_vars", variables, "must be a mapping of names to text")
        for key, value in (variables or {}).items():
            if not isinstance(key, str) or not isinstance(value, str):
                # Its type and not itself: it may be a secret.
                form = (
                    ": `WARMPATH_ROUTER: |`, and the lines below it"
                    if key == ROUTER_VARIABLE
                    else " in quotes"
                )
                needed = f"must be text{form}, not {type(value).__name__}"
                raise ConfigError(f"{where}.env_vars.{key}", HIDDEN, needed)


def _check_resources(application: Mapping[str, Any]) -> None:
    """Serve's schema takes anything, and Ray refuses text when the application is built."""
    for each in application.get("deployments", []):
        resources = (each.get("ray_actor_options") or {}).get("resources") or {}
        for name, amount in resources.items():
            if not isinstance(amount, int | float) or amount < 0:
                where = f"{_place_of(application)}.deployments.{each['name']}.ray_actor_options.resources"
                raise ConfigError(f"{where}.{name}", amount, "must be a number, 0 or more, and not in quotes")


def _require_one_loop(application: Mapping[str, Any]) -> None:
    """`ray_actor_options` in the file replaces `deploy/app.py`'s, and with it a variable the Router needs."""
    if options_of(application, "Router").get("ray_actor_options") is None:
        return
    value, where = _router_variable(application, ONE_LOOP_VARIABLE)
    if value != "0":
        raise ConfigError(where, value, 'must be "0" where ray_actor_options is set')


def _router_variable(application: Mapping[str, Any], name: str) -> tuple[str | None, str]:
    """One variable of the Routers' environment, None if the file does not set it, and where it belongs."""
    options = options_of(application, "Router").get("ray_actor_options") or {}
    variables = {
        **((application.get("runtime_env") or {}).get("env_vars") or {}),
        **((options.get("runtime_env") or {}).get("env_vars") or {}),
    }
    place = f"{_place_of(application)}.deployments.Router.ray_actor_options.runtime_env.env_vars"
    return variables.get(name), f"{place}.{name}"


def _require_gpus(application: Mapping[str, Any], device: str, num_ranks: int) -> None:
    """Likewise the GPU that `deploy/app.py` asks Ray for: without it Ray gives none, and hides none."""
    options = options_of(application, "Replica").get("ray_actor_options")
    if options is None or device == "cpu":
        return
    where = f"{_place_of(application)}.deployments.Replica.ray_actor_options.num_gpus"
    num_gpus = options.get("num_gpus")
    if num_gpus is None or (device == "cuda" and not num_gpus):
        accepted = str(num_ranks) if num_ranks > 1 else "above 0 and at most 1"
        without = "" if device == "cuda" else ", or 0 where there are no GPUs"
        needed = f"must be {accepted} where ray_actor_options is set and device is {device}{without}"
        raise ConfigError(where, num_gpus, needed)
    if num_gpus and num_gpus != num_ranks and max(num_gpus, num_ranks) > 1:
        # Each rank computes on a card of its own; a card more would be nobody's.
        raise ConfigError(where, num_gpus, f"must be {num_ranks}, as args.replica.tensor_parallel is")


def options_of(application: Mapping[str, Any], deployment: str) -> Mapping[str, Any]:
    """One deployment's options; empty if it is not mentioned."""
    for options in application.get("deployments", []):
        if options.get("name") == deployment:
            found: Mapping[str, Any] = options
            return found
    return {}


def _with_numbers(given: Any, read: Any) -> Any:
    """`given` with numbers where Serve's schema, whose reading of it is `read`, has taken text for them."""
    if isinstance(given, Mapping) and isinstance(read, BaseModel):
        return {key: _with_numbers(value, getattr(read, key, None)) for key, value in given.items()}
    if isinstance(given, list) and isinstance(read, list):
        return [_with_numbers(*each) for each in zip(given, read, strict=True)]
    return read if isinstance(given, str) and isinstance(read, int | float) else given


def _refuse_typos(content: Mapping[str, Any]) -> None:
    _refuse_unknown("deploy.yaml", content, ServeDeploySchema.model_fields)
    _refuse_unknown("http_options", content.get("http_options"), HTTPOptionsSchema.model_fields)
    _refuse_unknown("grpc_options", content.get("grpc_options"), gRPCOptionsSchema.model_fields)
    _refuse_unknown("logging_config", content.get("logging_config"), LoggingConfig.model_fields)
    for application in _mappings(content.get("applications")):
        place = _place_of(application)
        _refuse_unknown(place, application, ServeApplicationSchema.model_fields)
        for deployment in _mappings(application.get("deployments")):
            where = f"{place}.deployments.{deployment.get('name')}"
            _refuse_unknown(where, deployment, DeploymentSchema.model_fields)
            options = deployment.get("ray_actor_options")
            _refuse_unknown(f"{where}.ray_actor_options", options, RayActorOptionsSchema.model_fields)
            check_scaling(where, deployment)


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    """The list's mappings: what is none is left to Serve's own check, which names it."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _refuse_unknown(where: str, value: Any, known: Iterable[str]) -> None:
    names = set(known)
    for key in value if isinstance(value, Mapping) else ():
        if key not in names:
            raise UnknownKey(where, str(key), names)
