"""Accelerators and interconnects by name, from their datasheets, for devices that are not at hand.

Operations are of dense matrix products in bfloat16, or float16 where a device has no other; what of
them a training reaches is ``EFFICIENCY``. Bandwidths of interconnects are those of one direction.

Sources: NVIDIA's datasheets of V100 (2020), A10 (2021), A100 (2021), L4, L40S and H100 (2023), H200
and B200 (2024), and its GeForce Ada whitepaper (2022); AMD's of Instinct MI250X (2021) and MI300X
(2023); PCI-SIG's rates for 16 lanes; InfiniBand Trade Association's for 4 lanes. Latencies are of
a message between two processes, as nccl-tests and perftest commonly report them.
"""

import msgspec

from lockstep.cluster.topology import Link

# The part of the datasheet's operations that trainings of large models reach: 0.44 to 0.52 in
# Megatron-LM's table of 10 models on A100 (Narayanan et al. 2021).
EFFICIENCY = 0.45


class Accelerator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of device.

    Attributes:
        teraflops: 10^12 floating point operations per second, at most.
        memory: its size, such as ``"24GiB"``.
        kind: torch's name of its type.
    """

    teraflops: float
    memory: str
    kind: str = "cuda"


ACCELERATORS = {
    "V100-16GB": Accelerator(teraflops=125, memory="16GiB"),
    "V100-32GB": Accelerator(teraflops=125, memory="32GiB"),
    "A10": Accelerator(teraflops=125, memory="24GiB"),
    "A100-40GB": Accelerator(teraflops=312, memory="40GiB"),
    "A100-80GB": Accelerator(teraflops=312, memory="80GiB"),
    "L4": Accelerator(teraflops=121, memory="24GiB"),
    "L40S": Accelerator(teraflops=362, memory="48GiB"),
    "RTX-4090": Accelerator(teraflops=165, memory="24GiB"),
    "H100": Accelerator(teraflops=989, memory="80GiB"),
    "H200": Accelerator(teraflops=989, memory="141GiB"),
    "B200": Accelerator(teraflops=2250, memory="180GiB"),
    "MI250X": Accelerator(teraflops=383, memory="128GiB"),
    "MI300X": Accelerator(teraflops=1307, memory="192GiB"),
}


def _link(gigabytes: float, microseconds: float) -> Link:
    return Link(latency_seconds=microseconds * 1e-6, bytes_per_second=gigabytes * 1e9)


INTERCONNECTS = {
    "nvlink2": _link(150, 5),
    "nvlink3": _link(300, 5),
    "nvlink4": _link(450, 5),
    "nvlink5": _link(900, 5),
    "infinity-fabric": _link(448, 5),
    "pcie3": _link(15.75, 10),
    "pcie4": _link(31.5, 10),
    "pcie5": _link(63, 10),
    "infiniband-edr": _link(12.5, 5),
    "infiniband-hdr": _link(25, 5),
    "infiniband-ndr": _link(50, 5),
    "ethernet-1": _link(0.125, 50),
    "ethernet-10": _link(1.25, 50),
    "ethernet-25": _link(3.125, 30),
    "ethernet-100": _link(12.5, 20),
}

# Of bfloat16's operations, what a device does in float32 without tensor cores: 67 of 989 on H100.
_IN_FLOAT32 = 1 / 15

# What joins devices of a host of which nothing else is known.
DEFAULT_LINK = INTERCONNECTS["pcie4"]


def operations_per_second(model: str, precision: str) -> float:
    """What a training reaches on a device whose driver gives this name; 0 if it is not known."""
    words = model.upper().replace("-", " ").split()
    for name, one in ACCELERATORS.items():
        if name.removeprefix("RTX-").partition("-")[0] in words:
            factor = 1.0 if precision.startswith(("bf16", "fp16")) else _IN_FLOAT32
            return one.teraflops * 1e12 * EFFICIENCY * factor
    return 0.0
