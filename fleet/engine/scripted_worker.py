"""A scripted engine's worker in the direct way: a real rank of the process group, with nothing to load into."""

from asyppo_async.fleet.engine.protocol import DirectPlace
from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.checksum import checksum_of
from asyppo_async.weights.group import WeightGroup
from asyppo_async.weights.stream import receive_tensors


class ScriptedWorker:
    """The one worker's place in the process group; what arrives is hashed and let go."""

    def __init__(self, place: DirectPlace) -> None:
        self._place = place
        self._buckets = plan_buckets(place.manifest, place.bucket_bytes)
        self.checksums: tuple[int, ...] = ()
        self.group = WeightGroup.join(
            backend=place.backend,
            store=(place.store_host, place.store_port),
            rank=place.first_rank,
            world_size=place.world_size,
            epoch=place.epoch,
            deadline_s=place.deadline_s,
        )

    def receive(self, deadline_s: float) -> None:
        arriving = receive_tensors(self.group, self._place.manifest, self._buckets, deadline_s)
        self.checksums = tuple(checksum_of(tensor) for _, tensor in arriving)
