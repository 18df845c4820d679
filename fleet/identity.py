"""What a server is, known before its engine starts."""

import secrets
from dataclasses import dataclass

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import ConfigError
from asyppo_async.fingerprint import ModelIdentity, model_identity
from asyppo_async.weights.manifest import Manifest, manifest_of_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerIdentity:
    server_id: str
    """Unique per start."""
    model: ModelIdentity
    manifest: Manifest
    """What a publication must carry."""


def identify(config: ServeConfig) -> ServerIdentity:
    """Read the model folder's small files and headers.

    Raises:
        ConfigError: it is no model folder, or lacks its configuration or its tokenizer.
        WeightSyncError: its weights cannot be read.
    """
    if not config.model.is_dir():
        raise ConfigError(f"--model: there is no model folder {config.model}")
    return ServerIdentity(
        server_id=secrets.token_hex(8),
        model=model_identity(config.model),
        manifest=manifest_of_checkpoint(config.model, config.dtype),
    )
