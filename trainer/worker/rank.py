"""One rank of a group from its settings to its answers: what each request does here."""

from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from asyppo_async.errors import ConfigError, WorkerError
from asyppo_async.fingerprint import tokenizer_fingerprint
from asyppo_async.trainer.worker.actor import Actor
from asyppo_async.trainer.worker.backend.choice import open_backend
from asyppo_async.trainer.worker.backend.protocol import Backend
from asyppo_async.trainer.worker.codec import Message
from asyppo_async.trainer.worker.control import (
    Done,
    Loaded,
    MoveToDevice,
    MoveToHost,
    RestoreState,
    SaveState,
    SeeFolder,
    WorkerSettings,
)
from asyppo_async.trainer.worker.critic import CriticLearner
from asyppo_async.trainer.worker.critic_model import BACKBONE, load_critic
from asyppo_async.trainer.worker.documents import cutting_of
from asyppo_async.trainer.worker.experts import Experts
from asyppo_async.trainer.worker.fit import StateBytes, check_fit, footprint_of, free_bytes
from asyppo_async.trainer.worker.lora_layers import adapt
from asyppo_async.trainer.worker.messages import ActorForward, ActorTrain, CriticForward, CriticTrain, Save
from asyppo_async.trainer.worker.model import load_policy
from asyppo_async.trainer.worker.model_files import ModelFiles
from asyppo_async.trainer.worker.names import CheckpointNames
from asyppo_async.trainer.worker.packing import Cutting
from asyppo_async.trainer.worker.published import (
    AdapterWeights,
    Published,
    WholeWeights,
    manifest_of_adapters,
    manifest_of_weights,
)
from asyppo_async.trainer.worker.rank_state import RankState
from asyppo_async.trainer.worker.reference import BaseOfAdapters, load_reference
from asyppo_async.trainer.worker.sender import Sender
from asyppo_async.trainer.worker.session_messages import CloseSession, JoinSession, OpenSession, SendWeights
from asyppo_async.trainer.worker.steps import Stepper
from asyppo_async.trainer.worker.world import World
from asyppo_async.weights.manifest import Dtype


class Rank(Protocol):
    """What `serve` needs of a rank."""

    loaded: Loaded
    """What the coordinator is told when the model is there."""
    state: RankState
    """What is saved and restored of it."""

    def answer(self, request: Message) -> Message:
        """Do what is asked.

        Raises:
            WorkerError: a rank of this role does no such thing.
        """
        ...


class ActorRank:
    def __init__(self, settings: WorkerSettings, world: World, device: str) -> None:
        self._folder = Path(settings.model)
        free = free_bytes(torch.device(device))
        policy = load_policy(self._folder, settings.dtype, float32_head=settings.float32_head)
        policy.module.to(device)
        if settings.routing_replay:
            Experts(policy).check()
        names = CheckpointNames(policy.module)
        adapters = adapt(policy.module, settings)
        shapes = {name: tuple(weight.shape) for name, weight in policy.module.named_parameters()}
        # Under adapters the weights that the run starts from are still there.
        own_base = bool(adapters.layers) and settings.reference == settings.model
        reference = load_reference(
            "" if own_base else settings.reference,
            settings.dtype,
            device,
            vocab_size=policy.vocab_size,
            float32_head=settings.float32_head,
        )
        frozen = None if reference is None else reference.module
        seeing = [policy.module] if frozen is None else [policy.module, frozen]
        cutting = cutting_of(settings, *seeing)
        state = _check_fit(policy.module, settings, world)
        footprint = footprint_of(device, free, seeing, state)
        self._backend = open_backend(policy, settings, world, adapters)
        stepper = _stepper(self._backend, settings, world, cutting)
        self._moving = reference if settings.moving_reference else None
        self.state = RankState(
            self._backend,
            stepper,
            world,
            self._move_reference,
            base_checksum=adapters.base_checksum,
            beside=frozen,
        )
        self._actor = Actor(policy, stepper, reference=BaseOfAdapters(policy) if own_base else reference)
        self._files = ModelFiles(self._backend, adapters, settings, world)
        dtype: Dtype = "bfloat16" if settings.dtype == "bfloat16" else "float32"
        whole = manifest_of_weights(names, self._folder, dtype)
        weights: Published
        if adapters.layers and settings.publish == "adapter":
            weights = AdapterWeights(self._backend, adapters, manifest_of_adapters(adapters, shapes, whole))
        else:
            weights = WholeWeights(self._backend, names, whole, adapters)
        self._sender = Sender(weights, bucket_bytes=settings.bucket_bytes, rank=world.rank)
        self.loaded = Loaded(
            vocab_size=policy.vocab_size,
            tokenizer_fingerprint=_fingerprint(self._folder),
            num_parameters=names.num_parameters,
            manifest=self._sender.manifest,
            footprint=footprint,
        )

    def answer(self, request: Message) -> Message:
        reply: Message = Done()
        match request:
            case ActorForward():
                reply = self._actor.forward(request)
            case ActorTrain():
                reply = self._actor.train(request)
                self._move_reference()
            case SendWeights():
                reply = self._sender.send(request)
            case OpenSession():
                reply = self._sender.open(request)
            case JoinSession():
                self._sender.join(request)
            case CloseSession():
                self._sender.close()
            case Save():
                self._files.save(Path(request.folder), adapter=request.adapter)
            case _:
                raise WorkerError(f"an actor does not answer {type(request).__name__}")
        return reply

    def _move_reference(self) -> None:
        if self._moving is not None:
            self._moving.become(self._backend.averages())


class CriticRank:
    def __init__(self, settings: WorkerSettings, world: World, device: str) -> None:
        self._folder = Path(settings.model)
        free = free_bytes(torch.device(device))
        critic = load_critic(
            self._folder, settings.dtype, settings.seed, head_std=settings.head_std, frozen=settings.frozen
        )
        num_parameters = sum(parameter.numel() for parameter in critic.module.parameters())
        adapters = adapt(critic.root, settings, prefix=BACKBONE)
        critic.module.to(device)
        cutting = cutting_of(settings, critic.root)
        state = _check_fit(critic.module, settings, world)
        footprint = footprint_of(device, free, [critic.module], state)
        self._backend = open_backend(critic, settings, world, adapters)
        self._files = ModelFiles(self._backend, adapters, settings, world)
        stepper = _stepper(self._backend, settings, world, cutting)
        self.state = RankState(self._backend, stepper, world, base_checksum=adapters.base_checksum)
        self._learner = CriticLearner(critic, stepper)
        self.loaded = Loaded(
            vocab_size=critic.vocab_size,
            tokenizer_fingerprint=_fingerprint(self._folder),
            num_parameters=num_parameters,
            manifest=None,
            footprint=footprint,
        )

    def answer(self, request: Message) -> Message:
        match request:
            case CriticForward():
                return self._learner.forward(request)
            case CriticTrain():
                return self._learner.train(request)
            case Save():
                self._files.save(Path(request.folder), adapter=request.adapter)
                return Done()
        raise WorkerError(f"a critic does not answer {type(request).__name__}")


def answer(rank: Rank, request: Message) -> Message:
    """What a rank of any role is asked, or else what this role is asked."""
    match request:
        case SaveState():
            rank.state.save(Path(request.folder))
        case RestoreState():
            rank.state.restore(Path(request.folder), average=request.average)
        case SeeFolder():
            rank.state.see(request)
        case MoveToHost():
            rank.state.to_host(weights=request.weights)
        case MoveToDevice():
            rank.state.to_device()
        case _:
            return rank.answer(request)
    return Done()


def open_rank(settings: WorkerSettings, world: World, device: str) -> Rank:
    """Load the model of the rank's role on `device`."""
    return (ActorRank if settings.role == "actor" else CriticRank)(settings, world, device)


def _check_fit(module: nn.Module, settings: WorkerSettings, world: World) -> StateBytes:
    device = next(module.parameters()).device
    return check_fit(module, settings, world.size, free_bytes(device), free_bytes(torch.device("cpu")))


def _stepper(backend: Backend, settings: WorkerSettings, world: World, cutting: Cutting) -> Stepper:
    return Stepper(backend, world, cutting=cutting, non_finite_budget=settings.non_finite_budget)


def _fingerprint(folder: Path) -> str:
    try:
        return tokenizer_fingerprint(folder)
    except ConfigError:
        return ""
