"""Whole runs in which adapters train, over the real engine: published as whole weights, and alone."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.integration.run.conftest import Finished, Runner, Server

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

SETTINGS = (
    "run.num_steps=4",
    "actor.lora_rank=4",
    "actor.learning_rate=1e-3",
    "critic.lora_rank=4",
    "critic.learning_rate=1e-3",
    "checkpoint.every_steps=2",
)


def sets(*more: str) -> list[str]:
    return [part for setting in (*SETTINGS, *more) for part in ("--set", setting)]


def check_run(done: Finished, steps: int) -> None:
    assert done.code == 0, done.err
    assert done.summary["outcome"] == "finished" and done.summary["steps"] == steps
    assert done.summary["logprob_gap_fresh_mean"] < 1e-4 and done.summary["logprob_gap_fresh_tokens"] > 0
    for row in done.rows:
        for part in ("fixed", "fresh"):
            assert row[f"probe/{part}_gap_mean_nats"] <= row["probe/bound_nats"] < 1e-2


def check_model(run: Path, base_folder: Path) -> dict[str, torch.Tensor]:
    """Projections have moved, everything else is the base."""
    base, trained = (load_file(folder / "model.safetensors") for folder in (base_folder, run / "model"))
    assert base.keys() == trained.keys()
    for name, tensor in trained.items():
        assert torch.equal(tensor, base[name]) == ("_proj" not in name), name
    return trained


def test_run_with_adapters_when_they_are_merged_then_any_server_serves_it_and_peft_reads_its_export(
    runner: Runner, server: Server
) -> None:
    done = runner.run("merged", "--fleet", server.address, *sets())
    check_run(done, 4)
    base_folder = runner.models / "actor"
    check_model(done.folder, base_folder)
    target = runner.folder / "exported"
    exported = runner.finish(
        runner.command("export", str(done.folder), "--adapter", "--to", str(target)), "merged"
    )
    assert exported.code == 0, exported.err
    assert {path.name for path in target.iterdir()} == {"adapter", "critic-adapters"}
    assert (target / "critic-adapters" / "critic-1" / "value_head.safetensors").is_file()
    ids = torch.arange(9)[None]
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    whole = AutoModelForCausalLM.from_pretrained(done.folder / "model")
    through_peft = PeftModel.from_pretrained(base, target / "adapter")
    torch.testing.assert_close(through_peft(ids).logits, whole(ids).logits, atol=1e-4, rtol=0)

    refused = runner.run("alone-on-whole", "--fleet", server.address, *sets("weights.lora=adapter"))
    assert refused.code == 1 and "start it with --enable-lora" in refused.err, refused.err


def test_run_with_adapters_when_they_are_published_alone_then_few_bytes_travel_and_a_resume_goes_on(
    runner: Runner,
) -> None:
    done = runner.run("alone", *sets("weights.lora=adapter"))
    check_run(done, 4)
    trained = check_model(done.folder, runner.models / "actor")
    whole_bytes = sum(tensor.numel() * tensor.element_size() for tensor in trained.values())
    assert all(0 < row["weights/sent_bytes"] < whole_bytes / 4 for row in done.rows)
    command = runner.command("resume", str(done.folder), "--set", "run.num_steps=6")
    resumed = runner.finish(command, "alone")
    check_run(resumed, 6)
    assert resumed.summary["resumes"] == 1
