"""What a server is, known before its engine starts."""

import secrets
from dataclasses import dataclass

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import ConfigError
from asyppo_async.fingerprint import ModelIdentity, model_identity, quantization
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
        ConfigError: it is no model folder, lacks its configuration or its tokenizer, or is quantized.
        WeightSyncError: its weights cannot be read.
    """
    if not config.model.is_dir():
        raise ConfigError(f"--model: there is no model folder {config.model}")
    if method := quantization(config.model):
        raise ConfigError(
            f"--model: the weights in {config.model} are quantized ({method}); a trainer publishes whole tensors of "
            "--dtype, which such an engine would round again, so that log-probs of both sides differ: serve the "
            "checkpoint that it was made from"
        )
    return ServerIdentity(
        server_id=secrets.token_hex(8),
        model=model_identity(config.model),
        manifest=manifest_of_checkpoint(config.model, config.dtype),
    )
