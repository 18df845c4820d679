"""Entry point that vLLM calls in each of its processes, before it builds anything."""

import ctypes
import multiprocessing
import os
import signal
from importlib import metadata

from asyppo_async.errors import ConfigError

BACKEND = "asyppo"
PLUGIN_NAME = "asyppo_async"

_PR_SET_PDEATHSIG = 1
_GROUP = "vllm.general_plugins"


def register() -> None:
    """Make our weight-transfer engine known, and tie the life of vLLM's child processes to their parent's."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "asyppo_async.fleet.engine.vllm_transfer", "AsyppoTransferEngine"
        )
    if multiprocessing.parent_process() is not None:
        _die_with_parent()
        # A Ctrl-C in a terminal reaches the whole process group; the server drains first and then ends its children.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def check_enabled() -> None:
    """Raise `ConfigError` where vLLM would not load this plugin in its processes."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in [name.strip() for name in allowed.split(",")]:
        raise ConfigError(
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading the plugin {PLUGIN_NAME!r}, without which no weights "
            f"can be received; unset it or add {PLUGIN_NAME}"
        )
    if PLUGIN_NAME not in {entry.name for entry in metadata.entry_points(group=_GROUP)}:
        raise ConfigError(
            f"the entry point {PLUGIN_NAME!r} of the group {_GROUP!r} is not installed; install the package with pip"
        )


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends: a parent killed with -9 would leave the engine behind."""
    parent = multiprocessing.parent_process()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(code)}")
    if parent is not None and os.getppid() != parent.pid:  # it ended before the kernel knew of our wish
        os.kill(os.getpid(), signal.SIGKILL)
