"""What the command line takes and refuses, without an engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import ConfigError
from asyppo_async.fleet.engine.vllm_options import memory_arguments, prepare_environment

SCRIPT = Path(sys.executable).with_name("asyppo-fleet")


def fleet(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_help_when_asked_then_every_setting_is_explained_without_torch() -> None:
    run = fleet("serve", "--help")
    assert run.returncode == 0
    for name in ServeConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in run.stdout
        assert ServeConfig.model_fields[name].description, name
    code = "import sys, asyppo_async.fleet.cli; sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-seqs", "1"], "--max-num-seqs: Input should be greater than or equal to 2, got 1"),
        (["--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines"),
        (["--probe-slots", "128"], "leaves no slot"),
        (["--dtype", "float16"], "--dtype: Input should be 'float32' or 'bfloat16', got 'float16'"),
        ([], "there is no model folder"),
    ],
    ids=["range", "host", "slots", "dtype", "folder"],
)
def test_serve_when_a_setting_is_wrong_then_one_line_and_exit_code_1(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    run = fleet("serve", "--model", str(tmp_path / "absent"), *arguments)
    assert run.returncode == 1
    assert run.stderr.startswith("error: ")
    assert message in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.3.2.1"])
def test_host_when_loopback_then_needs_nothing(host: str) -> None:
    ServeConfig(model=Path("m"), host=host).check_exposure(has_token=False)


@pytest.mark.report("P82")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "node1"])
def test_host_when_beyond_loopback_then_needs_a_token_client_certificates_or_the_flag(host: str) -> None:
    tls = {"tls_cert": Path("c"), "tls_key": Path("k")}
    for open_to_all in (
        ServeConfig(model=Path("m"), host=host),
        ServeConfig(model=Path("m"), host=host, **tls),
    ):
        with pytest.raises(ConfigError, match="--insecure"):
            open_to_all.check_exposure(has_token=False)
        open_to_all.check_exposure(has_token=True)
    ServeConfig(model=Path("m"), host=host, tls_client_ca=Path("a"), **tls).check_exposure(has_token=False)
    ServeConfig(model=Path("m"), host=host, insecure=True).check_exposure(has_token=False)


def test_memory_when_the_engine_is_on_a_cpu_or_a_gpu_then_it_gets_the_option_that_it_knows() -> None:
    config = ServeConfig(model=Path("m"), kv_cache_gib=0.5, gpu_memory_utilization=0.7)
    assert memory_arguments(config, on_cpu=True) == {"kv_cache_memory_bytes": 2**29}
    assert memory_arguments(config, on_cpu=False) == {"gpu_memory_utilization": 0.7}
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        ServeConfig(model=Path("m"), gpu_memory_utilization=1.5)


def test_environment_when_it_disables_our_plugin_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "some_other")
    with pytest.raises(ConfigError, match="VLLM_PLUGINS='some_other'"):
        prepare_environment(ServeConfig(model=Path("m")))


@pytest.mark.report("P81")
def test_environment_of_the_engine_when_prepared_then_it_spawns_and_its_threads_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # put back after the test
        monkeypatch.delenv(name)
    prepare_environment(ServeConfig(model=Path("m"), num_threads=2))
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert (os.environ["OMP_NUM_THREADS"], os.environ["VLLM_CPU_OMP_THREADS_BIND"]) == ("2", "nobind")
