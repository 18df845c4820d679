"""Where critics lie on disk: one folder for all of them, or `critic-0`, `critic-1`, ... side by side."""

from pathlib import Path

from asyppo_async.config.critic import CriticSection
from asyppo_async.errors import ConfigError

HEAD_FILE = "value_head.safetensors"
"""The value head, beside a backbone in Hugging Face format."""


def critic_name(index: int) -> str:
    """Of the folder of one critic of several."""
    return f"critic-{index}"


def critic_folders(critic: CriticSection) -> list[Path]:
    """The folder of each critic.

    Raises:
        ConfigError: A critic has no model, or its model holds critics, and not this one.
    """
    models = [critic.of(index).model for index in range(critic.count)]
    if None in models:
        raise ConfigError(f"critic.model is missing, and critic.count is {critic.count}")
    return [critic_folder(model, index) for index, model in enumerate(models) if model is not None]


def critic_folder(model: Path, index: int) -> Path:
    """The folder that critic `index` starts from.

    Raises:
        ConfigError: `model` holds critics, and not this one.
    """
    if not (model / critic_name(0)).is_dir():
        return model
    own = model / critic_name(index)
    if not own.is_dir():
        found = len(list(model.glob(f"{critic_name(0)[:-1]}*")))
        raise ConfigError(
            f"critic.model {model} holds {found} critics, and critic.count asks for more; lower it"
        )
    return own
