"""What can be found wrong with the model, the API keys and this machine before a cluster is started.

Reads files and this machine's memory; starts no Ray. It needs no torch: transformers would bring it, where
`hide_torch` has not been called before.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cache.counted import counted
from cache.errors import ConfigError
from deploy.cpus import cpus_each, machine_cpus
from deploy.errors import MachineLacks
from deploy.scaling_options import replica_bounds
from deploy.serve_file import ServeFile
from deploy.tokenizer import checked_template
from replica.config import ReplicaConfig
from replica.memory import free_host_bytes
from replica.models.config_rules import check_config
from replica.models.generation_config import sampling_defaults
from replica.models.model_source import NotEnoughMemory, resolve
from replica.models.weight_files import check_weights, weight_bytes
from router.tenants.tenancy import check_settings

NVIDIA_CARDS = Path("/proc/driver/nvidia/gpus")  # a folder for each
NVML = "libnvidia-ml.so.1"  # the driver's management library
# Debian's "local" scheme has no headers of its own.
SCHEME = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
INCLUDE = Path(sysconfig.get_path("include", SCHEME))
FOR_CARDS = ("triton", "flash_attn")  # attention backends that compute on nothing else
ON_CPUS = "device: cpu under args.replica"


def check_models(file: ServeFile) -> str:
    """Finds the model and refuses what cannot be loaded. Returns its id.

    Raises ModelRefused, and ConfigError for sequences longer than it has positions for, or for defaults of
    sampling that it sets and that cannot be had.
    """
    config = file.app.replica
    model = resolve(config.model, config.revision)
    if config.runner == "simulated":  # of the model it has the tokenizer alone
        checked_template(model)
        return "simulated"
    check_weights(model)
    check_config(model, config.max_model_len)
    limit = model.max_model_len
    if limit is not None and config.max_model_len is not None and config.max_model_len > limit:
        accepted = f"must be at most {limit}, the positions that {model.source} knows"
        raise ConfigError("args.replica.max_model_len", config.max_model_len, accepted)
    checked_template(model)
    file.app.router_sketch(model_sampling=sampling_defaults(model))
    return model.model_id


def check_gpus(file: ServeFile, num_gpus: float) -> None:
    """num_gpus: what the cluster has, or will at most. Raises ConfigError when replicas ask for more, and
    when they would take some and ask for none.

    Serve itself would leave those without a GPU pending for ever, and say nothing.
    """
    asked = _gpus_asked(file, num_gpus)
    if asked.is_more_than(num_gpus):
        raise _too_many(file, asked, num_gpus)


def check_cpus(file: ServeFile, num_cpus: float) -> None:
    """num_cpus: as `check_gpus` has it. Raises ConfigError when the replicas and Routers that there are at
    least ask for more: some would be pending for ever, a Router maybe, and nobody could ask the rest.

    Those that scaling adds are not counted: the service is there without them.
    """
    asked = _cpus_asked(file)
    if asked.is_more_than(num_cpus):
        raise _too_many(file, asked, num_cpus)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What replicas and Routers ask Ray for of one resource."""

    resource: str  # "CPUs"
    scaled_key: str  # of `autoscaling_config`, which says how many replicas are counted
    each: float  # replica
    num_replicas: int
    by_routers: float  # all of them
    instead: str = ""  # what else may be set where there are too few, with "; " before it

    @property
    def by_each(self) -> str:
        """ "1 GPU", "0.5 GPUs": what one replica takes."""
        return f"{self.each:g} {self.resource.removesuffix('s') if self.each == 1 else self.resource}"

    @property
    def in_all(self) -> float:
        return self.num_replicas * self.each + self.by_routers

    def fitting(self, there_are: float) -> int:
        """Replicas that there is room for."""
        return _times(max(0.0, there_are - self.by_routers), self.each)

    def is_more_than(self, there_are: float) -> bool:
        return self.each > 0 and self.num_replicas > self.fitting(there_are)

    def there(self, there_are: float) -> str:
        """What there is, and what of it is not for replicas."""
        routers = f", of which Routers take {self.by_routers:g}" if self.by_routers else ""
        return f"there are {there_are:g}{routers}"


class _GpusAsked(_Asked):
    def fitting(self, there_are: float) -> int:
        """Ray gives a part of a GPU from one GPU alone: of two, 0.6 are there twice, and not three times."""
        fitting = _Asked.fitting(self, there_are)
        if self.each < 1:
            in_cards = int(there_are) * _times(1, self.each) + _times(there_are % 1, self.each)
            fitting = min(fitting, in_cards)
        return fitting

    def there(self, there_are: float) -> str:
        """What else has to be said where the sum would fit."""
        per_card = "" if self.in_all > there_are else f", each with room for {_times(1, self.each)}"
        return _Asked.there(self, there_are) + per_card


def _too_many(file: ServeFile, asked: _Asked, there_are: float) -> ConfigError:
    each = f"each takes {asked.by_each}"
    accepted = f"must be at most {asked.fitting(there_are)}: {each}, and {asked.there(there_are)}"
    accepted += asked.instead
    where = f"applications.{file.app_name}.deployments.Replica.{_key(file, asked)}"
    return ConfigError(where, asked.num_replicas, accepted)


def _key(file: ServeFile, asked: _Asked) -> str:
    """What says how many replicas there are."""
    is_scaled = file.options("Replica").get("autoscaling_config")
    return f"autoscaling_config.{asked.scaled_key}" if is_scaled else "num_replicas"


def _times(whole: float, part: float) -> int:
    """How many parts are in it: ten tenths, which `//` takes for nine."""
    return int(whole / part + 1e-9)


def _gpus_asked(file: ServeFile, num_gpus: float) -> _GpusAsked:
    """num_gpus: what there is; where device is auto and there is none, nobody asks for any.

    Raises ConfigError for replicas that would compute on GPUs and ask for none.
    """
    config, options = file.app.replica, file.options("Replica")
    actor, instead = options.get("ray_actor_options"), ""
    if actor is None:  # `deploy/app.py` asks for one a rank where there are any
        is_for_cpus = config.device == "cpu" or (config.device == "auto" and not num_gpus)
        each = 0.0 if is_for_cpus else float(config.tensor_parallel)
        instead = _instead_of_cards(config)
    else:
        each = float(actor.get("num_gpus") or 0)
        if not each and num_gpus and config.device == "auto" and config.runner != "simulated":
            # Ray hides no GPU from who asks for none: all replicas would compute on the first one.
            where = f"applications.{file.app_name}.deployments.Replica.ray_actor_options.num_gpus"
            accepted = "must be above 0 where there are GPUs and device is auto; for CPUs, set device: cpu"
            raise ConfigError(where, actor.get("num_gpus"), accepted)
    by_router = float((file.options("Router").get("ray_actor_options") or {}).get("num_gpus") or 0)
    num_routers = replica_bounds(file.options("Router"))[1]
    num_replicas = replica_bounds(options)[1]
    return _GpusAsked("GPUs", "max_replicas", each, num_replicas, by_router * num_routers, instead)


def _instead_of_cards(config: ReplicaConfig) -> str:
    """For who has not said cuda, and may not know that auto is: the file as it ships has two replicas."""
    if config.device != "auto" or config.attention_backend in FOR_CARDS:
        return ""
    shared = ", and deploy/gpu.yaml two on one card (make serve DEPLOY=deploy/gpu.yaml)"
    return f"; {ON_CPUS} runs them on CPUs{shared if config.tensor_parallel == 1 else ''}"


def _cpus_asked(file: ServeFile) -> _Asked:
    replicas, routers = file.options("Replica"), file.options("Router")
    by_routers = cpus_each("Router", routers) * replica_bounds(routers)[0]
    return _Asked("CPUs", "min_replicas", cpus_each("Replica", replicas), file.num_replicas, by_routers)


def check_here(file: ServeFile, cards: int | None = None, cpus: float | None = None) -> None:
    """Raises MachineLacks, with all that this machine lacks of what the file's replicas ask of theirs, and
    ConfigError where they would take GPUs and ask for none, or compute on CPUs by what is for cards.

    cards: NVIDIA cards here; None = as many as its driver tells of. cpus: None = as Ray counts them.
    """
    cards = num_cards() if cards is None else cards
    cpus = machine_cpus() if cpus is None else cpus
    lacking = "an NVIDIA card" if not cards else "NVIDIA cards"
    missing = _missing(lacking, file, _gpus_asked(file, cards), cards)
    missing += _missing("CPUs", file, _cpus_asked(file), cpus)
    missing += _missing_to_compute(file.app.replica, cards)
    if missing:
        raise MachineLacks(missing)


def check_packages(file: ServeFile) -> None:
    """As `check_here`, of what the replicas compute with alone: how many there may be, Ray's own numbers say
    once it runs."""
    missing = _missing_to_compute(file.app.replica, num_cards())
    if missing:
        raise MachineLacks(missing, counted_elsewhere=False)


def _missing_to_compute(config: ReplicaConfig, cards: int) -> list[str]:
    """Raises ConfigError where CPUs are to compute by what is for cards."""
    if config.runner == "simulated":
        return []
    if config.device == "cuda" or (config.device == "auto" and cards):
        return _missing_packages(config.attention_backend)
    if config.attention_backend not in FOR_CARDS:
        return []
    if config.device == "cpu":
        accepted = "must be auto or gather_sdpa where device is cpu"
        raise ConfigError("args.replica.attention_backend", config.attention_backend, accepted)
    return [f"an NVIDIA card, for attention_backend: {config.attention_backend}"]


def _missing(lacking: str, file: ServeFile, asked: _Asked, there_are: float) -> list[str]:
    if not asked.is_more_than(there_are):
        return []
    each, fitting = f"{asked.by_each} each", asked.fitting(there_are)
    verb = "takes" if asked.num_replicas == 1 else "take"
    takes = f"{counted(asked.num_replicas, 'replica')} {verb} {each}, {asked.in_all:g} in all"
    way_out = f"; {_key(file, asked)} may be {fitting}" if fitting else ""
    return [f"{lacking}: {takes}, and {asked.there(there_are)}{way_out}{asked.instead}"]


def _missing_packages(attention_backend: str) -> list[str]:
    missing = []
    if (version := _torch_for_cpus()) is not None:
        without = "" if attention_backend in FOR_CARDS else f"; {ON_CPUS} does without"
        missing.append(f"a torch that computes on cards: {version} is built for CPUs alone{without}")
    if attention_backend == "triton":
        if not _is_installed("triton"):
            missing.append("the package triton, for attention_backend: triton (it comes with torch for CUDA)")
        missing += [f"{tool}, for attention_backend: triton" for tool in _lacking_build_tools()]
    if attention_backend == "flash_attn" and not _is_installed("flash_attn"):
        missing.append("the package flash-attn, for attention_backend: flash_attn (pip install .[gpu])")
    return missing


def num_cards() -> int:
    """NVIDIA cards that the driver of this machine tells of, less those that CUDA_VISIBLE_DEVICES hides: from
    Ray, too, for which `auto` is CPUs where it hides all."""
    try:
        cards = sum(1 for _ in NVIDIA_CARDS.iterdir())
    except OSError:  # where the driver is the host's, as in WSL and some sandboxes, its library has to do
        cards = _cards_by_library()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return cards
    # As Ray reads it, which does not look which cards are named.
    return min(cards, 0 if visible in ("", "NoDevFiles") else len(visible.split(",")))


def _cards_by_library() -> int:
    """As NVML counts them, which is how Ray does; 0 without it."""
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return count.value


def _torch_for_cpus() -> str | None:
    """The torch that is installed, if it is one of those that know no card."""
    version = metadata.version("torch")
    return f"torch {version}" if version.endswith("+cpu") else None


def _lacking_build_tools() -> list[str]:
    """Of what Triton starts its kernels with: it compiles C for them on the machine that they run on."""
    lacking = []
    names = [named] if (named := os.environ.get("CC")) else ["gcc", "clang"]
    if not any(map(shutil.which, names)):
        lacking.append("a C compiler (gcc, clang, or what CC names)")
    if not (INCLUDE / "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        lacking.append(f"Python's C headers (as in the package python{version}-dev)")
    return lacking


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def check_keys(file: ServeFile) -> None:
    """The API keys and the secret, as a Router on this machine would find them. Raises ConfigError."""
    try:
        check_settings(file.app.tenants)
    except ConfigError as error:
        # A field of the key file is named as it stands there.
        where = "args.router." if error.field.startswith("tenants.") else ""
        raise ConfigError(where + error.field, error.value, error.accepted) from None


def check_memory(file: ServeFile) -> None:
    """What all replicas take of this machine's memory must fit into it together: what they keep of evicted
    blocks and, without a GPU, their weights.

    Each replica checks its own share again, KV blocks included, before it loads.
    Raises NotEnoughMemory with both numbers.
    """
    config = file.app.replica
    if config.runner == "simulated":  # keeps nothing of blocks but their names
        return
    takes = {
        "the weights": _weight_bytes_here(config),
        "host_cache_gib": int(config.host_cache_gib * (1 << 30)),
    }
    needed = file.num_replicas * sum(takes.values())
    free = free_host_bytes()
    if needed > free:
        what = " and ".join(name for name, count in takes.items() if count)
        purpose = f"{what} of {counted(file.num_replicas, 'replica')}"
        raise NotEnoughMemory(config.model, needed, free, "this machine", purpose)


def _weight_bytes_here(config: ReplicaConfig) -> int:
    """Of one replica, in this machine's memory; 0 also where they are not known yet."""
    if config.device == "cuda" or (config.device == "auto" and num_cards()):  # then `auto` is CUDA
        return 0
    model = resolve(config.model, config.revision)
    if model.hub_id is not None:  # not fetched yet: the replica knows its size when it has been
        return 0
    return weight_bytes(model, "float32" if config.dtype == "auto" else config.dtype)
