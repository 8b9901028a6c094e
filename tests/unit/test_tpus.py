"""TPUs without a TPU: what is missing is told, and a process begins with its own chip.

What trains on them is in ``tests/tpu``, which runs on torch_tpu (``make test-tpu``).
"""

import os
from collections.abc import Callable, Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lockstep
from lockstep import accelerators
from lockstep.cluster import devices, tpu
from lockstep.errors import DeviceError, OptionError

VERSIONS = {"torch": "2.13.0+cpu", "torch_tpu": "0.2.0"}
NEEDS = ["numpy>=2", "torch>=2.11.0,<=2.15.0"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes packages appear as installed, and no others of torch_tpu's."""

    def install(*packages: str, versions: dict[str, str] = VERSIONS) -> None:
        monkeypatch.setattr(tpu, "find_spec", lambda name: name in packages or None)
        monkeypatch.setattr(metadata, "version", versions.__getitem__)
        monkeypatch.setattr(metadata, "requires", lambda name: NEEDS)
        monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)

    return install


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, installed: Callable[..., None]) -> Iterator[Any]:
    """A torch with two TPUs, which notes how a process begins to use its own."""
    installed("torch_tpu", "libtpu")
    module = SimpleNamespace(began_with=[], begun=False, asked=[])
    module.is_initialized = lambda: module.begun
    module.distributed = SimpleNamespace(set_tpu_launch_env=_set_launch_env)

    def begin(*size: int, device: str) -> None:
        module.begun = True
        module.began_with.append({name: os.environ[name] for name in _NAMES if name in os.environ})

    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda **_: SimpleNamespace(type="tpu")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1 if module.begun else 2)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(torch, "empty", begin)
    monkeypatch.setattr(accelerators, "_chips", [])
    devices._count_of_tpus.cache_clear()
    yield module
    devices._count_of_tpus.cache_clear()


_NAMES = ("TPU_VISIBLE_CHIPS", "TPU_PROCESS_BOUNDS", "TORCH_TPU_TOPOLOGY", "WORLD_SIZE")


def _set_launch_env(*, nproc_per_node: int) -> None:
    os.environ["TORCH_TPU_TOPOLOGY"] = f"{nproc_per_node},1,1"


@pytest.mark.parametrize(
    ("packages", "versions", "says"),
    [
        ((), VERSIONS, r"torch_tpu.*is not installed.*pip install torch_tpu"),
        (("torch_tpu",), VERSIONS, r"cannot be imported without libtpu.*pip install libtpu"),
        (
            ("torch_tpu", "libtpu"),
            VERSIONS | {"torch": "2.10.1"},
            r"torch 2\.10\.1 and torch_tpu 0\.2\.0 do not match: it needs torch>=2\.11\.0",
        ),
        (("torch_tpu", "libtpu"), VERSIONS | {"torch": "2.16.0"}, "do not match"),
        (("torch_tpu", "libtpu"), VERSIONS, "finds no TPU on this host"),
    ],
)
def test_what_is_missing_is_told(
    packages: tuple[str, ...],
    versions: dict[str, str],
    says: str,
    installed: Callable[..., None],
) -> None:
    installed(*packages, versions=versions)
    for ask in (lockstep.TPUStrategy, lockstep.initialize_tpu_system):
        with pytest.raises(DeviceError, match=says) as caught:
            ask()
        assert "\n" not in str(caught.value)
    with pytest.raises(DeviceError):
        lockstep.MirroredStrategy(["tpu:0"])


def test_a_named_library_stands_for_libtpu(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("torch_tpu")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/a/plugin.so")
    assert tpu.missing_part() is None


def test_a_process_begins_with_its_own_chip(fake: Any) -> None:
    """And leaves the environment as it was: other processes have other chips."""
    before = dict(os.environ)
    strategy = lockstep.TPUStrategy(lockstep.TPUClusterResolver(tpu=""))
    assert list(fake.began_with[0].values()) == ["0", "1,1,1", "1,1,1"]
    assert dict(os.environ) == before
    assert strategy.num_replicas_in_sync == 2
    assert lockstep.initialize_tpu_system() == ("tpu:0", "tpu:1")
    assert lockstep.TPUClusterResolver().num_accelerators() == {"TPU": 2}
    assert lockstep.TPUStrategy(1).num_replicas_in_sync == 1
    assert len(fake.began_with) == 1


def test_each_process_of_a_launcher_has_the_next(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the runtime takes it for the only process: else it would count the chips of all."""
    place = SimpleNamespace(process=1)
    monkeypatch.setattr("lockstep.strategies.tpu.find_place", lambda environ: place)
    monkeypatch.setenv("WORLD_SIZE", "2")
    lockstep.TPUStrategy()
    assert fake.began_with[0]["TPU_VISIBLE_CHIPS"] == "1"
    assert "WORLD_SIZE" not in fake.began_with[0]
    assert os.environ["WORLD_SIZE"] == "2"


def test_names_choose(fake: Any) -> None:
    assert lockstep.TPUStrategy(["tpu:1"]).num_replicas_in_sync == 1
    assert fake.began_with[0]["TPU_VISIBLE_CHIPS"] == "1"
    with pytest.raises(DeviceError, match=r"already uses tpu:1.*initialize_tpu_system"):
        accelerators.rank_device(["tpu:0", "tpu:1"], 0)
    # In torch it is the first of every process.
    assert accelerators.identity(SimpleNamespace(type="tpu", index=0)) == "tpu:1"  # type: ignore[arg-type]


def test_a_process_that_took_all_tpus_can_train_on_one_alone(fake: Any) -> None:
    """``torch.manual_seed`` takes them all."""
    fake.begun = True
    with pytest.raises(DeviceError, match=r"begun without Lockstep.*torch\.manual_seed"):
        accelerators.rank_device(["tpu:0", "tpu:1"], 0)
    assert fake.began_with == []


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (3, r"This host has 2 devices of kind tpu"),
        (["tpu:2"], r"accelerators are: tpu:0, tpu:1"),
        (["cpu", "cpu"], r"trains on TPUs"),
        (["tpu:0", "tpu:0"], r"can have one rank"),
        (0, r"a number of devices, at least 1"),
    ],
)
def test_what_are_no_tpus_is_refused(asked: Any, says: str, fake: Any) -> None:
    with pytest.raises(DeviceError, match=says):
        lockstep.TPUStrategy(asked)
    assert fake.began_with == []


def test_a_tpu_elsewhere_is_refused() -> None:
    with pytest.raises(OptionError, match=r"on which the script runs.*grpc://10.0.0.2"):
        lockstep.TPUClusterResolver("grpc://10.0.0.2:8470")
