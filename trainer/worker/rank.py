"""One rank of a group from its settings to its answers: what each request does here."""

from pathlib import Path
from typing import Protocol

from torch import nn

from asyppo_async.errors import ConfigError, WorkerError
from asyppo_async.fingerprint import tokenizer_fingerprint
from asyppo_async.trainer.worker.actor import Actor
from asyppo_async.trainer.worker.backend.choice import open_backend
from asyppo_async.trainer.worker.backend.protocol import Backend
from asyppo_async.trainer.worker.codec import Message
from asyppo_async.trainer.worker.control import Done, Loaded, WorkerSettings
from asyppo_async.trainer.worker.critic import CriticLearner
from asyppo_async.trainer.worker.messages import (
    ActorForward,
    ActorTrain,
    CloseSession,
    CriticForward,
    CriticTrain,
    JoinSession,
    OpenSession,
    Save,
    SendWeights,
)
from asyppo_async.trainer.worker.model import copy_companions, load_critic, load_policy
from asyppo_async.trainer.worker.sender import Sender
from asyppo_async.trainer.worker.steps import Stepper
from asyppo_async.trainer.worker.world import World
from asyppo_async.weights.manifest import Dtype, Manifest


class Rank(Protocol):
    """What `serve` needs of a rank."""

    loaded: Loaded
    """What the coordinator is told when the model is there."""

    def answer(self, request: Message) -> Message:
        """Do what is asked.

        Raises:
            WorkerError: a rank of this role does no such thing.
        """
        ...


class ActorRank:
    def __init__(self, settings: WorkerSettings, world: World, device: str) -> None:
        self._folder = Path(settings.model)
        self._rank = world.rank
        policy = load_policy(self._folder, settings.dtype)
        policy.module.to(device)
        self._backend = open_backend(policy.module, settings, world)
        self._actor = Actor(
            policy, _stepper(self._backend, settings, world), micro_batch_tokens=settings.micro_batch_tokens
        )
        dtype: Dtype = "bfloat16" if settings.dtype == "bfloat16" else "float32"
        self._sender = Sender(
            self._backend,
            self._folder,
            dtype=dtype,
            bucket_bytes=settings.bucket_bytes,
            rank=world.rank,
        )
        _check_names(self._sender.manifest, policy.module, self._folder)
        self.loaded = Loaded(
            vocab_size=policy.vocab_size,
            tokenizer_fingerprint=_fingerprint(self._folder),
            num_parameters=_num_parameters(policy.module),
            manifest=self._sender.manifest,
        )

    def answer(self, request: Message) -> Message:
        reply: Message = Done()
        match request:
            case ActorForward():
                reply = self._actor.forward(request)
            case ActorTrain():
                reply = self._actor.train(request)
            case SendWeights():
                reply = self._sender.send(request)
            case OpenSession():
                reply = self._sender.open(request)
            case JoinSession():
                self._sender.join(request)
            case CloseSession():
                self._sender.close()
            case Save():
                self._save(Path(request.folder))
            case _:
                raise WorkerError(f"an actor does not answer {type(request).__name__}")
        return reply

    def _save(self, folder: Path) -> None:
        """All or nothing: the folder appears when it is complete."""
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        self._backend.save(unfinished)
        if self._rank == 0:
            copy_companions(self._folder, unfinished)
            unfinished.rename(folder)


class CriticRank:
    def __init__(self, settings: WorkerSettings, world: World, device: str) -> None:
        folder = Path(settings.model)
        critic = load_critic(folder, settings.dtype, settings.seed)
        critic.module.to(device)
        backend = open_backend(critic.module, settings, world)
        self._learner = CriticLearner(
            critic, _stepper(backend, settings, world), micro_batch_tokens=settings.micro_batch_tokens
        )
        self.loaded = Loaded(
            vocab_size=critic.vocab_size,
            tokenizer_fingerprint=_fingerprint(folder),
            num_parameters=_num_parameters(critic.module),
            manifest=None,
        )

    def answer(self, request: Message) -> Message:
        match request:
            case CriticForward():
                return self._learner.forward(request)
            case CriticTrain():
                return self._learner.train(request)
        raise WorkerError(f"a critic does not answer {type(request).__name__}")


def open_rank(settings: WorkerSettings, world: World, device: str) -> Rank:
    """Load the model of the rank's role on `device`."""
    return (ActorRank if settings.role == "actor" else CriticRank)(settings, world, device)


def _stepper(backend: Backend, settings: WorkerSettings, world: World) -> Stepper:
    return Stepper(
        backend,
        world,
        micro_batch_tokens=settings.micro_batch_tokens,
        non_finite_budget=settings.non_finite_budget,
    )


def _fingerprint(folder: Path) -> str:
    try:
        return tokenizer_fingerprint(folder)
    except ConfigError:
        return ""


def _check_names(manifest: Manifest, module: nn.Module, folder: Path) -> None:
    """A publication names tensors as the checkpoint does, and the engine loads them so: the model must too."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    wanted = {spec.name: spec.shape for spec in manifest.tensors}
    if shapes != wanted:
        different = sorted(
            name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name)
        )
        raise ConfigError(
            f"{len(different)} tensors of {folder} are named or shaped otherwise in the loaded model, so they cannot "
            f"be published: {', '.join(different[:3])}"
        )


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
