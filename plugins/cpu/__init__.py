"""The CPU kernels of our ops: in an OpenVINO extension, and in a host of their own for graphs that are all packed.

On the CPU target a pool is a u8 input [num_blocks, layers, 2, kv_heads, tokens_per_block, head_size * bytes] that
the ops write in place, with FP32 scales beside it for quantized types; KVCacheUpdate gives q_rotated only.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.plugins import DOMAIN, DOMAIN_VERSION, OPS, OpDef
from trtforge.plugins.cpu.ops import CPU_OPS, CPU_OPS_VERSION
from trtforge.plugins.cpu.packing import PACKING_VERSION
from trtforge.plugins.errors import EnvironmentProblem

if TYPE_CHECKING:
    import openvino as ov

LIBRARY_NAME = "libtrtforge_cpu.so"

#: The ops that the OpenVINO extension has.
OPENVINO_OPS = {
    name: (OPS | CPU_OPS)[name]
    for name in ("KVCacheUpdate", "PagedAttention", "PackedEmbedding", "PackedLinear")
}


def library_path() -> Path:
    """The extension library that the installation compiled; raises EnvironmentProblem if there is none."""
    path = Path(__file__).with_name(LIBRARY_NAME)
    if not path.is_file():
        raise EnvironmentProblem(
            f"{path}: the CPU kernels are not compiled; install a C++17 compiler (g++) and install trtforge again"
        )
    return path


def versions() -> dict[str, str]:
    """What an engine of OpenVINO was compiled with and must be loaded with."""
    return {"openvino": version("openvino"), **native_versions()}


def native_versions() -> dict[str, str]:
    """The same of an engine of the native host."""
    return {"ops": f"{DOMAIN} {DOMAIN_VERSION}, cpu {CPU_OPS_VERSION}, packing {PACKING_VERSION}"}


def register(core: ov.Core) -> None:
    """Make `core` know our ops: in ONNX files (with or without function bodies) and in OpenVINO's own IR.

    Raises EnvironmentProblem if the library is missing or does not load.
    """
    from openvino.frontend.onnx import ConversionExtension

    path = str(library_path())
    try:
        core.add_extension(path)
    except RuntimeError as e:
        raise EnvironmentProblem(
            f"{path}: does not load, perhaps because openvino was changed after it was compiled; "
            f"install trtforge again ({' '.join(str(e).split())})"
        ) from e
    for op in OPENVINO_OPS.values():
        core.add_extension(ConversionExtension(op.name, DOMAIN, _converter(op, path)))


def _converter(op: OpDef, library: str) -> Callable[[Any], Any]:
    """Turns an ONNX node of a lowered graph, whose pool outputs are gone, into the extension's op."""
    from openvino.utils.node_factory import NodeFactory

    factory = NodeFactory()
    factory.add_extension(library)

    def convert(node: Any) -> Any:
        inputs = [node.get_input(i) for i in range(node.get_input_size())]
        attributes = {a.name: node.get_attribute(a.name, a.default) for a in op.attributes}
        return factory.create(op.name, inputs, op.complete(attributes)).outputs()

    return convert
