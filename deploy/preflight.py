"""What can be found wrong with the model, the API keys and this machine before a cluster is started.

Reads files and this machine's memory; imports neither Ray nor torch.
"""

from __future__ import annotations

from cache.errors import ConfigError
from deploy.serve_file import ServeFile
from replica.memory import free_host_bytes
from replica.models.model_source import NotEnoughMemory, resolve, weight_bytes
from router.tenants.tenancy import check_settings


def check_models(file: ServeFile) -> str:
    """Finds the model and refuses what cannot be loaded. Returns its id. Raises ModelRefused."""
    config = file.app.replica
    if config.runner == "simulated":
        return "simulated"
    return resolve(config.model, config.revision).model_id


def check_keys(file: ServeFile) -> None:
    """The API keys and the secret, as a Router on this machine would find them. Raises ConfigError."""
    try:
        check_settings(file.app.tenants)
    except ConfigError as error:
        # A field of the key file is named as it stands there.
        where = "args.router." if error.field.startswith("tenants.") else ""
        raise ConfigError(where + error.field, error.value, error.accepted) from None


def check_memory(file: ServeFile) -> None:
    """On a machine without GPU every replica's weights must fit into it together.

    Each replica checks its own share again, KV blocks included, before it loads.
    Raises NotEnoughMemory with both numbers.
    """
    config = file.app.replica
    if config.runner == "simulated" or config.device == "cuda":
        return
    model = resolve(config.model, config.revision)
    if model.hub_id is not None:  # not fetched yet: the replica knows its size when it has been
        return
    dtype = "float32" if config.dtype == "auto" else config.dtype
    needed = file.num_replicas * weight_bytes(model, dtype)
    free = free_host_bytes()
    if needed > free:
        purpose = f"the weights of {file.num_replicas} replicas"
        raise NotEnoughMemory(config.model, needed, free, "cpu", purpose)
