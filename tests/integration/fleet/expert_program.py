"""Real experts of vLLM through weight updates, as a program: how far each update leaves them from plain arithmetic.

Arguments: address of a free port for vLLM's own process group. Prints one JSON object: the largest absolute difference
after the first load, after an update without and with `PackedExperts`, and after one that loads nothing.
"""

import json
import sys
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from asyppo_async.fleet.engine.vllm_experts import PackedExperts

NUM_EXPERTS, TOP_K, HIDDEN, INNER, NUM_TOKENS = 8, 2, 64, 32, 5


class Float32:
    """What the reload asks of a model's configuration."""

    dtype = torch.float32


def weights_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return {
        f"{expert}.{name}.weight": 0.2 * torch.randn(shape, generator=generator)
        for expert in range(NUM_EXPERTS)
        for name, shape in shapes.items()
    }


def by_hand(weights: Mapping[str, Tensor], hidden: Tensor, logits: Tensor) -> Tensor:
    """Token by token: the two most likely experts, their probabilities normalised."""
    gates, chosen = logits.softmax(-1).topk(TOP_K, -1)
    rows = []
    for state, gate, experts in zip(
        hidden, gates / gates.sum(-1, keepdim=True), chosen.tolist(), strict=True
    ):
        row = torch.zeros(HIDDEN)
        for share, expert in zip(gate, experts, strict=True):
            own = {name: weights[f"{expert}.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj")}
            inner = functional.silu(own["gate_proj"] @ state) * (own["up_proj"] @ state)
            row += share * (own["down_proj"] @ inner)
        rows.append(row)
    return torch.stack(rows)


class Experts:
    """One layer of experts, and what goes through it."""

    def __init__(self) -> None:
        self.model = nn.Module()
        self.model.experts = FusedMoEFactory(
            NUM_EXPERTS, TOP_K, HIDDEN, INNER, params_dtype=torch.float32, prefix="model.experts"
        )
        record_metadata_for_reloading(self.model)
        generator = torch.Generator().manual_seed(9)
        self.hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
        self.logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        assert set(self.model.experts.load_weights(iter(weights.items())))

    def process(self) -> None:
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)

    def update(self, weights: Mapping[str, Tensor] | None, *, pack: bool) -> None:
        packed = PackedExperts(self.model) if pack else None
        initialize_layerwise_reload(self.model)
        if weights is not None:
            self.load(weights)
        finalize_layerwise_reload(self.model, Float32)
        if packed is not None:
            packed.give_back()

    def gap(self, config: VllmConfig, weights: Mapping[str, Tensor]) -> float:
        with set_forward_context(None, config, num_tokens=NUM_TOKENS):
            computed = self.model.experts(self.hidden.clone(), self.logits.clone())
        return float((computed - by_hand(weights, self.hidden, self.logits)).abs().max())


def main(address: str) -> None:
    config = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://{address}", 0, "gloo")
        initialize_model_parallel(1, 1)
        experts = Experts()
        experts.load(weights_of(0))
        experts.process()
        gaps = {"loaded": experts.gap(config, weights_of(0))}
        experts.update(weights_of(1), pack=False)
        gaps["updated_by_vllm_alone"] = experts.gap(config, weights_of(1))
        for seed in (2, 3):
            experts.update(weights_of(seed), pack=True)
            gaps[f"updated_{seed}"] = experts.gap(config, weights_of(seed))
        experts.update(None, pack=True)
        gaps["nothing_loaded"] = experts.gap(config, weights_of(3))
    print(json.dumps(gaps), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
