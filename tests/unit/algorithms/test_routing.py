import pytest
import torch
from torch import nn

from asyppo_async.algorithms.routing import ExpertRouting, pack_routing, replayed_gates, routing_replay

F64 = torch.float64


class TopKRouter(nn.Module):
    """The contract of transformers' routers: (logits, gate weights, experts)."""

    def __init__(self, hidden, num_experts, top_k):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, hidden, dtype=F64))
        self.noise = torch.zeros(num_experts, dtype=F64)
        self.top_k = top_k

    def forward(self, x):
        logits = x @ self.weight.T
        chosen = (logits + self.noise).topk(self.top_k, -1).indices
        gates = torch.softmax(logits.float(), -1).gather(1, chosen)
        return logits, (gates / gates.sum(-1, keepdim=True)).to(logits.dtype), chosen


class ToyMoe(nn.Module):
    """Two mixture layers and a head; `routers` of another instance may be noisy."""

    def __init__(self, hidden=6, num_experts=5, top_k=2, vocabulary=9):
        super().__init__()
        self.routers = nn.ModuleList(TopKRouter(hidden, num_experts, top_k) for _ in range(2))
        self.experts = nn.ParameterList(torch.randn(num_experts, hidden, hidden, dtype=F64) for _ in range(2))
        self.head = nn.Parameter(torch.randn(vocabulary, hidden, dtype=F64))

    def forward(self, x):
        chosen = []
        for router, experts in zip(self.routers, self.experts, strict=True):
            _, gates, index = router(x)
            chosen.append(index)
            x = x + torch.einsum("nk,nkij,nj->ni", gates, experts[index], x).tanh()
        return torch.log_softmax(x @ self.head.T, -1), torch.stack(chosen, 1)


def scene():
    torch.manual_seed(0)
    model, x = ToyMoe(), torch.randn(7, 6, dtype=F64)
    ids = torch.randint(0, 9, (7,))
    with torch.no_grad():
        for router in model.routers:
            router.noise = torch.randn(5, dtype=F64) * 3
        logs, chosen = model(x)
        for router in model.routers:
            router.noise.zero_()
    return model, x, ids, logs.gather(1, ids[:, None])[:, 0], chosen


def ratio(model, x, ids, behaviour):
    logs, _ = model(x)
    return (logs.gather(1, ids[:, None])[:, 0] - behaviour).exp()


def test_replay_when_the_engine_routed_otherwise_then_ratio_is_one_only_with_replay():
    model, x, ids, behaviour, chosen = scene()
    # Two sequences of 4 and 3 positions; the engine never fed the last one of each.
    routing = pack_routing([ExpertRouting(experts=chosen[:3]), ExpertRouting(experts=chosen[4:6])], [4, 3])
    fed = routing.replayed
    assert fed.tolist() == [True, True, True, False, True, True, False]
    without = ratio(model, x, ids, behaviour).detach()
    assert float((without[fed] - 1).abs().max()) > 1e-3
    with routing_replay(list(model.routers), routing, normalise=True):
        replayed = ratio(model, x, ids, behaviour).detach()
    torch.testing.assert_close(replayed[fed], torch.ones(5, dtype=F64))
    torch.testing.assert_close(replayed[~fed], without[~fed])
    torch.testing.assert_close(ratio(model, x, ids, behaviour), without)


def test_replay_when_trained_then_the_router_still_gets_a_gradient():
    model, x, ids, behaviour, chosen = scene()
    routing = pack_routing([ExpertRouting(experts=chosen[:6])], [7])
    with routing_replay(list(model.routers), routing, normalise=True):
        ratio(model, x, ids, behaviour).sum().backward()
    assert all(float(router.weight.grad.abs().max()) > 0 for router in model.routers)


def test_gates_when_not_normalised_then_the_softmax_of_the_chosen():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    gates, experts = replayed_gates(logits, torch.tensor([[0, 1]]), torch.tensor([True]), normalise=False)
    torch.testing.assert_close(gates, torch.softmax(logits, -1)[:, :2])
    assert experts.tolist() == [[0, 1]]


def test_routing_when_positions_are_missing_then_says_so():
    with pytest.raises(ValueError, match="reported routing for 2"):
        pack_routing([ExpertRouting(experts=torch.zeros(2, 1, 2, dtype=torch.int16))], [5])
    with pytest.raises(ValueError, match="routing is"):
        ExpertRouting(experts=torch.zeros(2, 2))


def test_replay_when_forward_is_of_other_positions_then_says_so():
    model, x, _, _, chosen = scene()
    routing = pack_routing([ExpertRouting(experts=chosen[:3])], [4])
    routers = list(model.routers)
    too_many = pytest.raises(ValueError, match="of 4 positions but the forward has 7")
    with too_many, routing_replay(routers, routing, normalise=True):
        model(x)
    too_few = pytest.raises(ValueError, match="2 layers but the model 1 routers")
    with too_few, routing_replay(routers[:1], routing, normalise=True):
        model(x)


def test_replay_when_the_model_is_transformers_own_then_its_routers_keep_the_contract():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    routers = [layer.mlp.gate for layer in model.model.layers]
    ids = torch.randint(0, 16, (1, 6))
    own = []
    handles = [r.register_forward_hook(lambda _, __, out: own.append(out[2])) for r in routers]
    with torch.no_grad():
        plain = model(ids).logits
        for handle in handles:
            handle.remove()
        recorded = torch.stack(own, 1).to(torch.int16)
        same = pack_routing([ExpertRouting(experts=recorded[:5])], [6])
        with routing_replay(routers, same, normalise=True):
            replayed = model(ids).logits
        other = pack_routing([ExpertRouting(experts=(recorded[:5] + 1) % 4)], [6])
        with routing_replay(routers, other, normalise=True):
            changed = model(ids).logits
    torch.testing.assert_close(replayed, plain)
    assert float((changed - plain).abs().max()) > 1e-4
