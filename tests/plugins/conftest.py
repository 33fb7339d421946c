"""Fixtures of the op tests."""

import ctypes
from collections.abc import Iterator

import openvino
import pytest

from trtforge.plugins import cpu


@pytest.fixture(params=["generic", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels of one instruction set, forced for the test."""
    assert openvino.__version__  # loaded first: the extension finds its libraries by soname
    library = ctypes.CDLL(str(cpu.library_path()))
    library.trtforge_cpu_isa.restype = ctypes.c_char_p
    if not library.trtforge_cpu_force_isa(request.param.encode()):
        pytest.skip(f"this CPU lacks {request.param}")
    assert library.trtforge_cpu_isa().decode() == request.param
    yield request.param
    library.trtforge_cpu_force_isa(b"")
