from hypothesis import given
from hypothesis import strategies as st

from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.manifest import Manifest, TensorSpec

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "experts.0.up_proj")


@given(
    sizes=st.lists(st.integers(0, 2000), max_size=30),
    bucket_bytes=st.integers(64, 10_000),
)
def test_plan_buckets_when_given_any_manifest_then_buckets_cover_it_within_the_limit(
    sizes: list[int], bucket_bytes: int
) -> None:
    specs = [
        TensorSpec(name=f"layers.{index // 7}.{MODULES[index % 7]}.weight", shape=(size,), dtype="float32")
        for index, size in enumerate(sizes)
    ]
    manifest = Manifest(tensors=tuple(specs))
    buckets = plan_buckets(manifest, bucket_bytes)
    assert all(0 < bucket.num_bytes <= bucket_bytes for bucket in buckets)
    edges = [0, *(bucket.end for bucket in buckets)]
    assert [bucket.start for bucket in buckets] == edges[:-1]
    assert edges[-1] >= manifest.num_bytes
    assert all(bucket.start % 64 == 0 for bucket in buckets)
