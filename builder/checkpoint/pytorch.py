"""`pytorch_model.bin` files, through torch with `weights_only=True`: no code of the file is ever run.

torch is an optional extra; it maps the file, so a tensor's bytes are read when it is asked for.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.builder.checkpoint.base import TensorInfo
from trtforge.plugins.errors import CheckpointError, UnsupportedModel

_DTYPE_NAMES = {
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float64": "F64",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.int16": "I16",
    "torch.int32": "I32",
    "torch.int64": "I64",
    "torch.bool": "BOOL",
}


class PyTorchFile:
    """One `.bin` file of a state dict. Raises CheckpointError for a damaged or hostile one, UnsupportedModel
    without torch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors = _load(path)
        self.tensors = {name: _info(path, name, value) for name, value in self._tensors.items()}

    def read(self, name: str) -> NDArray[np.float32]:
        import torch

        tensor = self._tensors[name].detach().to(torch.float32, copy=True).contiguous()
        array: NDArray[np.float32] = tensor.numpy()
        return array

    def close(self) -> None:
        self._tensors = {}


def _load(path: Path) -> dict[str, Any]:
    try:
        import torch
    except ImportError as e:
        raise UnsupportedModel(
            f"{path}: PyTorch weights are read with torch, which is not installed; "
            "`pip install trtforge[pytorch]`, or pass a safetensors checkpoint"
        ) from e
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # an untrusted pickle may fail in any way; each means the same to its owner
        first_line = (str(e) or type(e).__name__).splitlines()[0][:200]
        raise CheckpointError(
            f"{path}: not a state dict that torch reads safely, weights only ({first_line}); "
            "convert it to safetensors where it is trusted"
        ) from e
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a state dict of named tensors")
    return state


def _info(path: Path, name: str, value: Any) -> TensorInfo:
    import torch

    if not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{path}: {name[:200]!r} is a {type(value).__name__}, not a tensor")
    dtype = _DTYPE_NAMES.get(str(value.dtype))
    if dtype is None or value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
        raise UnsupportedModel(
            f"{path}: tensor {name[:200]!r} is {value.dtype}, {value.layout}; save it as plain floats"
        )
    return TensorInfo(name, tuple(value.shape), dtype)
