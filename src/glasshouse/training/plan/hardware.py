"""GPUs by name: memory, and the speeds that programs reach on them."""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.config import did_you_mean, require
from glasshouse.errors import InputError

GIB = 2**30
# What programs reach of a data sheet: on an H200 a bfloat16 matmul 791 of 989 TFLOP/s, a copy 4.21 of 4.8 TB/s.
MATMUL_SHARE, COPY_SHARE, LINK_SHARE = 0.8, 0.88, 0.8


@dataclass(frozen=True)
class Gpu:
    """A GPU, and what connects it to others; speeds are those that are reached, not those of the data sheet.

    >>> find_gpu("h200").flops / 1e12, find_gpu("h200", tflops=791).flops / 1e12
    (791.2, 791.0)
    """

    name: str
    memory: int  # bytes
    flops: float  # of a large bfloat16 matmul, per second
    bandwidth: float  # bytes per second, of its memory
    link: float  # bytes per second, in each direction, to GPUs of the same node
    network: float  # likewise, to GPUs of other nodes


def _from_data_sheet(name: str, gib: float, tflops: float, bandwidth: float, link: float, network: float) -> Gpu:
    """Return a GPU from dense bfloat16 TFLOP/s, TB/s of memory, and GB/s per direction of its link and network."""
    return Gpu(
        name,
        memory=int(gib * GIB),
        flops=tflops * MATMUL_SHARE * 1e12,
        bandwidth=bandwidth * COPY_SHARE * 1e12,
        link=link * LINK_SHARE * 1e9,
        network=network * LINK_SHARE * 1e9,
    )


# Memory is what the driver reports. The network is one adapter per GPU: 200, 400 or 800 Gbit/s.
GPUS = {
    one.name: one
    for one in (
        _from_data_sheet("a100", 79.1, 312, 2.039, 300, 25),
        _from_data_sheet("h100", 79.1, 989, 3.35, 450, 50),
        _from_data_sheet("h200", 139.8, 989, 4.8, 450, 50),
        _from_data_sheet("b200", 178.3, 2250, 8.0, 900, 50),
        _from_data_sheet("mi300x", 191.7, 1307, 5.3, 448, 50),
        _from_data_sheet("l40s", 44.4, 362, 0.864, 32, 25),
        _from_data_sheet("rtx4090", 23.5, 165, 1.008, 32, 12.5),
    )
}


def find_gpu(
    name: str,
    *,
    memory: float | None = None,
    tflops: float | None = None,
    bandwidth: float | None = None,
    link: float | None = None,
    network: float | None = None,
) -> Gpu:
    """Return a GPU by name; what is given replaces its figures: GiB, TFLOP/s, TB/s and GB/s, as measured.

    >>> find_gpu("h300")
    Traceback (most recent call last):
    ...
    glasshouse.errors.InputError: there is no GPU 'h300' in the list; did you mean h200?
    """
    if name not in GPUS:
        raise InputError(f"there is no GPU {name!r} in the list; {did_you_mean(name, GPUS)}")
    known = GPUS[name]
    given = {"memory": memory, "tflops": tflops, "bandwidth": bandwidth, "link": link, "network": network}
    for key, value in given.items():
        require(value is None or value > 0, key, value, "above 0")
    return Gpu(
        name,
        memory=known.memory if memory is None else int(memory * GIB),
        flops=known.flops if tflops is None else tflops * 1e12,
        bandwidth=known.bandwidth if bandwidth is None else bandwidth * 1e12,
        link=known.link if link is None else link * 1e9,
        network=known.network if network is None else network * 1e9,
    )
