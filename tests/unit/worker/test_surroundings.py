"""What an environment says to ranks, and what of it contradicts itself or the machine."""

import pytest

from asyppo_async.trainer.worker.surroundings import contradictions, lines_about, told


def words_of(connect_host: str = "10.0.0.1", num_ranks: int = 2, **environment: str) -> list[str]:
    return contradictions(
        environment,
        interfaces=["lo", "eth0", "ib0"],
        connect_host=connect_host,
        num_ranks=num_ranks,
        num_cores=8,
    )


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {"NCCL_SOCKET_IFNAME": "bond"},
            "NCCL_SOCKET_IFNAME=bond names no interface of this machine (lo, eth0, ib0)",
        ),
        ({"NCCL_SOCKET_IFNAME": "=ib"}, "names no interface"),
        ({"NCCL_SOCKET_IFNAME": "^lo,eth,ib"}, "names no interface"),
        ({"NCCL_SOCKET_IFNAME": "lo"}, "is loopback, and the run is on 10.0.0.1"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "GLOO_SOCKET_IFNAME has no effect"),
        (
            {"NCCL_IB_HCA": "mlx5", "NCCL_IB_DISABLE": "1"},
            "NCCL_IB_DISABLE turns off what NCCL_IB_HCA chooses",
        ),
        ({"MASTER_ADDR": "a", "RANK": "3"}, "MASTER_ADDR, RANK of another launcher: not read"),
        ({"OMP_NUM_THREADS": "5"}, "OMP_NUM_THREADS=5 for each of 2 ranks is more than the 8 cores"),
        ({"OMP_WAIT_POLICY": "active"}, "use PASSIVE"),
        (
            {"NCCL_P2P_DISABLE": "1"},
            "NCCL_P2P_DISABLE=1: GPUs of one machine talk through host memory, which is slow",
        ),
    ],
)
def test_environment_when_it_cannot_be_meant_is_told_with_the_reason(
    environment: dict[str, str], words: str
) -> None:
    assert words in words_of(**environment)[0]


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_SOCKET_IFNAME": "eth"},
        {"NCCL_SOCKET_IFNAME": "=ib0"},
        {"NCCL_SOCKET_IFNAME": "^lo"},
        {"NCCL_IB_HCA": "mlx5", "NCCL_IB_DISABLE": "0"},
        {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"},
    ],
)
def test_environment_when_it_can_be_meant_is_left_alone(environment: dict[str, str]) -> None:
    assert words_of(**environment) == []


def test_loopback_when_the_run_is_on_this_machine_is_no_contradiction() -> None:
    assert words_of("127.0.0.1", NCCL_SOCKET_IFNAME="lo") == []


def test_proxy_when_it_holds_a_password_is_told_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy:3128")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    first, *warnings = lines_about("127.0.0.1", 1)
    assert "NCCL_DEBUG=WARN" in first
    assert any("https_proxy" in line and line.startswith("warning: ") for line in warnings)
    assert "secret" not in "".join([first, *warnings])


def test_nothing_when_nothing_is_set_is_told_as_such() -> None:
    assert told({"HOME": "/"}) == "environment: nothing set for NCCL, gloo or OpenMP"
