"""Packed responses: each scored and trained as if it were alone, for every family that is trained here."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.sections import ActorSection
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.control import WorkerSettings
from asyppo_async.trainer.worker.documents import cutting_of, let_pack
from asyppo_async.trainer.worker.messages import ActorForward
from asyppo_async.trainer.worker.model import load_policy
from asyppo_async.trainer.worker.specs import GroupTimes, specs_of
from asyppo_async.types import TokenSequences
from tests.unit.worker.learners import (
    TINY_SIZES,
    actor_request,
    critic_request,
    largest_difference,
    open_actor,
    open_critic,
    save_scattered,
    write_mixture,
    write_model,
)
from tests.unit.worker.test_model import rows_of

FAMILIES = ("qwen3", "llama", "qwen2", "mixture")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    qwen2 = Qwen2Config(**TINY_SIZES, tie_word_embeddings=True)
    return {
        "qwen3": write_model(root / "qwen3"),
        "llama": save_scattered(root / "llama", LlamaForCausalLM(LlamaConfig(**TINY_SIZES))),
        "qwen2": save_scattered(root / "qwen2", Qwen2ForCausalLM(qwen2)),
        "mixture": write_mixture(root / "mixture"),
        "mistral": save_scattered(
            root / "mistral", MistralForCausalLM(MistralConfig(**TINY_SIZES, sliding_window=4))
        ),
    }


@pytest.mark.report("P35")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_a_batch_are_those_of_each_response_alone(
    folders: dict[str, Path], sequences: TokenSequences, family: str, packed: bool
) -> None:
    actor = open_actor(folders[family], dtype="float32", micro_batch_tokens=40, packed=packed)
    got = actor.learner.forward(ActorForward(sequences=sequences, temperature=1.0)).logprobs
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32)
    alone = []
    for ids, num_prompt in rows_of(sequences):
        with torch.no_grad():
            logs = model(ids[None]).logits[0].log_softmax(-1)
        alone += [float(logs[at - 1, ids[at]]) for at in range(num_prompt, len(ids))]
    np.testing.assert_allclose(got, alone, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_packed_responses_are_those_of_padded_ones(
    folders: dict[str, Path], sequences: TokenSequences, family: str
) -> None:
    # The kernel of the experts knows no float64, so there both sides are rounded to float32.
    dtype, tolerance = ("float32", 2e-5) if family == "mixture" else ("float64", 1e-12)
    request = actor_request(sequences, [5, 4, 9])
    padded = open_actor(folders[family], dtype=dtype)  # type: ignore[arg-type]
    padded.learner.train(request)
    for budget, recompute in ((20, False), (47, True)):
        packed = open_actor(
            folders[family],
            dtype=dtype,  # type: ignore[arg-type]
            micro_batch_tokens=budget,
            packed=True,
            recompute=recompute,
        )
        packed.learner.train(request)
        differences = map(largest_difference, packed.backend.gradients, padded.backend.gradients)
        assert max(differences) < tolerance


def test_critic_gradients_of_packed_responses_are_those_of_padded_ones(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    request = critic_request(sequences, [5, 4])
    padded, packed = (open_critic(tiny_folder, micro_batch_tokens=30, packed=flag) for flag in (False, True))
    padded.learner.train(request)
    packed.learner.train(request)
    assert max(map(largest_difference, packed.backend.gradients, padded.backend.gradients)) < 1e-12


def test_model_with_a_sliding_window_is_not_packed(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="MistralForCausalLM has layers that do not attend to all tokens"):
        let_pack(load_policy(folders["mistral"], "float32").root)


def test_check_notices_documents_that_read_each_other(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(tiny_folder, "float32")
    leaking = "asyppo_async.trainer.worker.documents.document_attention"
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    monkeypatch.setattr(leaking, sdpa_attention_forward)
    with pytest.raises(ConfigError, match="cannot be packed: hidden states of two packed documents differ"):
        let_pack(policy.root)
    assert policy.module.config._attn_implementation == "sdpa"


def settings(folder: Path, packing: str) -> WorkerSettings:
    actor = ActorSection(model=folder, packing=packing, micro_batch_tokens=77)  # type: ignore[arg-type]
    times = GroupTimes(join_timeout_s=1, request_timeout_s=1, silent_after_s=1)
    (spec,) = specs_of(actor, CriticSection(count=0), seed=0, bucket_bytes=1024, times=times)
    return spec.settings


def test_packing_is_chosen_by_the_setting_and_by_what_the_model_takes(folders: dict[str, Path]) -> None:
    def of(family: str, packing: str) -> bool:
        cutting = cutting_of(settings(folders[family], packing), load_policy(folders[family], "float32").root)
        assert cutting.budget_tokens == 77
        return cutting.packed

    assert [of("llama", packing) for packing in ("padded", "packed", "auto")] == [False, True, True]
    assert [of("mistral", packing) for packing in ("padded", "auto")] == [False, False]
    with pytest.raises(ConfigError, match=r"actor\.packing = 'packed': Mistral.* use 'auto' or 'padded'"):
        of("mistral", "packed")


def test_saved_model_does_not_ask_for_the_packed_attention(tiny_folder: Path, tmp_path: Path) -> None:
    actor = open_actor(tiny_folder, dtype="float32", packed=True)
    actor.backend.save(tmp_path)
    assert "documents" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
