import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyppo_async.errors import WeightSyncError
from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.manifest import Manifest, TensorSpec, leaf_module, manifest_of_checkpoint


def float32(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype="float32")


def test_layout_when_sizes_are_odd_then_every_tensor_starts_at_a_multiple_of_64() -> None:
    manifest = Manifest(
        tensors=(
            float32("a", 3, 5),
            TensorSpec(name="b", shape=(7,), dtype="bfloat16"),
            float32("c"),
            float32("d", 16),
            float32("e", 1),
        )
    )
    assert manifest.offsets == (0, 64, 128, 192, 256)
    assert manifest.num_bytes == 260
    assert Manifest(tensors=()).num_bytes == 0


def test_manifest_when_a_name_comes_twice_then_it_is_refused() -> None:
    with pytest.raises(ValueError, match="every tensor once"):
        Manifest(tensors=(float32("a", 1), float32("a", 2)))


def test_difference_when_only_the_order_differs_then_there_is_none() -> None:
    one, two = float32("a", 1), float32("b", 2)
    assert Manifest(tensors=(one, two)).difference(Manifest(tensors=(two, one))) == []


def test_difference_when_tensors_differ_then_each_has_its_line_both_ways() -> None:
    mine = Manifest(tensors=(float32("a", 1), float32("b", 2, 3), float32("d", 4)))
    theirs = Manifest(
        tensors=(float32("b", 0), float32("c", 5), TensorSpec(name="d", shape=(4,), dtype="bfloat16"))
    )
    assert mine.difference(theirs) == [
        "missing: a [1] float32",
        "unexpected: c [5] float32",
        "differs: b [2, 3] float32 here, b [0] float32 there",
        "differs: d [4] float32 here, d [4] bfloat16 there",
    ]


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}]
)
def test_manifest_of_checkpoint_when_the_head_is_tied_then_it_is_named_once(
    tmp_path: Path, config: dict[str, object]
) -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(5, 2), "lm_head.weight": torch.zeros(5, 2)}
    write_checkpoint(tmp_path, tensors, config)
    assert manifest_of_checkpoint(tmp_path, "float32") == Manifest(
        tensors=(float32("model.embed_tokens.weight", 5, 2),)
    )
    write_checkpoint(tmp_path, tensors, {"tie_word_embeddings": False})
    assert len(manifest_of_checkpoint(tmp_path, "float32").tensors) == 2


def test_manifest_of_checkpoint_when_in_shards_then_layers_are_in_order_and_modules_together(
    tmp_path: Path,
) -> None:
    names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (10, 2, 0) for part in "vqok"]
    save_file({name: torch.zeros(2, 2) for name in names[::2]}, tmp_path / "model-00001.safetensors")
    save_file({name: torch.zeros(2, 2) for name in names[1::2]}, tmp_path / "model-00002.safetensors")
    index = {name: f"model-0000{1 + place % 2}.safetensors" for place, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    manifest = manifest_of_checkpoint(tmp_path, "bfloat16")
    assert [spec.name for spec in manifest.tensors] == [
        f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 2, 10) for part in "okqv"
    ]
    assert {spec.dtype for spec in manifest.tensors} == {"bfloat16"}


def test_manifest_of_checkpoint_when_there_is_none_then_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"holds no \.safetensors file"):
        manifest_of_checkpoint(tmp_path, "float32")


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 4, struct.pack("<Q", 2**50), struct.pack("<Q", 3) + b"{x}"]
)
def test_manifest_of_checkpoint_when_the_file_is_damaged_then_it_names_it(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightSyncError, match=r"model\.safetensors"):
        manifest_of_checkpoint(tmp_path, "float32")


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.qkv_proj"),
        ("model.layers.3.self_attn.v_proj.bias", "model.layers.3.self_attn.qkv_proj"),
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.gate_up_proj"),
        ("model.layers.3.mlp.down_proj.weight", "model.layers.3.mlp.down_proj"),
        ("model.layers.3.mlp.experts.17.gate_proj.weight", "model.layers.3.mlp.experts"),
        ("model.layers.3.mlp.experts.2.down_proj.weight", "model.layers.3.mlp.experts"),
        ("model.norm.weight", "model.norm"),
        ("weight", "weight"),
    ],
)
def test_leaf_module_when_tensors_are_fused_in_the_engine_then_they_share_it(name: str, module: str) -> None:
    assert leaf_module(name) == module


def attention_manifest() -> Manifest:
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    return Manifest(
        tensors=tuple(
            float32(f"model.layers.{layer}.self_attn.{part}.weight", 16, 16)
            for layer in (0, 1)
            for part in parts
        )
    )


@pytest.mark.parametrize(
    ("bucket_bytes", "cuts_kib"),
    [
        (100 * 1024, [0, 8]),
        (8 * 1024, [0, 8]),
        (7 * 1024, [0, 7, 8]),
        (5 * 1024, [0, 4, 8]),
        (3 * 1024, [0, 3, 4, 7, 8]),
        (2 * 1024 + 63, [0, 2, 4, 6, 8]),  # q k | v o: a module larger than a bucket is cut between tensors
        (1024, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_plan_buckets_when_modules_fit_then_cuts_are_between_them(
    bucket_bytes: int, cuts_kib: list[int]
) -> None:
    buckets = plan_buckets(attention_manifest(), bucket_bytes)
    assert [bucket.start for bucket in buckets] == [kib * 1024 for kib in cuts_kib[:-1]]
    assert [bucket.end for bucket in buckets] == [kib * 1024 for kib in cuts_kib[1:]]


def test_plan_buckets_when_a_tensor_is_larger_than_a_bucket_then_it_is_cut_into_pieces() -> None:
    manifest = Manifest(tensors=(float32("small", 3), float32("large", 100), float32("last", 1)))
    cuts = [(bucket.start, bucket.end) for bucket in plan_buckets(manifest, 130)]
    assert cuts == [(0, 64), (64, 192), (192, 320), (320, 448), (448, 516)]


def test_plan_buckets_when_the_bucket_is_smaller_than_the_alignment_then_it_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 64 bytes, got 63"):
        plan_buckets(attention_manifest(), 63)
