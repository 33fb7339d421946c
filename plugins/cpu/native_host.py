"""The native host: runs a program (program.py) of packed layers in libtrtforge_host.so, with no OpenVINO.

The structs mirror plugins/cpu/decoder.hpp field by field.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from contextlib import suppress
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.plugins.cpu.ops import LAYER_LINEARS
from trtforge.plugins.cpu.packing import PackedLayout
from trtforge.plugins.cpu.program import Node, Program, layouts, number_of
from trtforge.plugins.errors import EngineFailure, EnvironmentProblem
from trtforge.plugins.kv_dtypes import KV_DTYPES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LIBRARY_NAME = "libtrtforge_host.so"

_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "attention_post_norm", "mlp_post_norm")


class _Linear(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("in_features", "out_features", "group_size")),
        *((name, c_int64) for name in ("bits", "zero_point", "scale_bytes", "has_minimums")),
        ("weights", c_void_p),
        ("bias", c_void_p),
    )


class _Layer(Structure):
    _fields_ = (
        *((name, _Linear) for name in LAYER_LINEARS),
        *((name, c_void_p) for name in _NORMS),
        *((name, c_int64) for name in ("group", "layer", "rope", "window", "is_gelu")),
        *((name, c_float) for name in ("scale", "softcap", "epsilon", "padding")),
    )


class _Model(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("hidden", "num_heads", "num_kv_heads", "head_size")),
        *((name, c_int64) for name in ("num_layers", "num_groups", "num_ropes")),
        *((name, c_int64) for name in ("kv_dtype", "tokens_per_block")),
        *((name, c_int64) for name in ("int8_activations", "head_int8_activations")),
        ("layers", POINTER(_Layer)),
        ("embedding", _Linear),
        ("head", _Linear),
        ("norm", c_void_p),
        *((name, c_float) for name in ("embedding_scale", "logit_softcap", "epsilon", "padding")),
    )


class _Step(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "num_sequences", "num_logits")),
        *((name, c_void_p) for name in ("token_ids", "positions", "query_start", "kv_lengths", "logit_rows")),
        *((name, c_void_p) for name in ("cos_sin", "rotary", "slot_mapping", "block_tables", "max_blocks")),
    )


STRUCTS: tuple[type[Structure], ...] = (_Linear, _Layer, _Model, _Step)


@cache
def library() -> ctypes.CDLL:
    """The host's library, loaded once. Raises EnvironmentProblem if it is missing or does not load."""
    path = Path(__file__).with_name(LIBRARY_NAME)
    if not path.is_file():
        raise EnvironmentProblem(
            f"{path}: the CPU kernels are not compiled; install a C++17 compiler (g++) and install trtforge again"
        )
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as e:
        raise EnvironmentProblem(f"{path}: does not load; install trtforge again ({e})") from e
    loaded.trtforge_host_open.restype = c_void_p
    loaded.trtforge_host_open.argtypes = (POINTER(_Model), c_int)
    loaded.trtforge_host_close.argtypes = (c_void_p,)
    loaded.trtforge_host_close.restype = None
    loaded.trtforge_host_bind_pool.argtypes = (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64)
    loaded.trtforge_host_bind_pool.restype = None
    loaded.trtforge_host_run.argtypes = (c_void_p, POINTER(_Step), POINTER(c_void_p))
    loaded.trtforge_host_run.restype = c_char_p
    loaded.trtforge_host_isa.restype = c_char_p
    return loaded


class NativeHost:
    """A program, its weights mapped from their file, ready to run.

    Raises EnvironmentProblem if there is no memory or thread to be had.
    """

    def __init__(self, program: Program, weights: Path, tokens_per_block: int, threads: int) -> None:
        import numpy as np

        self._library = library()
        self._program = program
        with weights.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        # What is not in memory yet is then read in huge pages, where the file system can: fewer misses of the TLB.
        with suppress(OSError):  # a kernel without them
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._map.madvise(mmap.MADV_WILLNEED)
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        names = list(program.inputs)
        self._ropes, self._groups = (sum(n.startswith(p) for n in names) for p in ("cos_sin.", "kv_pool."))
        (self._vocab_size,) = program.input_sizes()["logits"]
        model = self._model(tokens_per_block)
        self._host: int | None = self._library.trtforge_host_open(byref(model), threads)
        if not self._host:
            raise EnvironmentProblem("the native host cannot start: no memory or no thread is to be had")
        self._pools: list[NDArray[Any]] = []  # kept: the host writes into them
        self._arrays: Mapping[str, NDArray[Any]] | None = None  # kept: of the step before
        self._step = _Step()
        self._logits_at = c_void_p()
        self._known_place: tuple[int | None, int] | None = None  # where `_known` is, and how many rows it has

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Of the inputs whose sizes a manifest has too: without the first dimension, by name."""
        return self._program.input_sizes()

    def bind_pool(self, group: int, rows: NDArray[np.uint8], scales: NDArray[np.float32] | None) -> None:
        """rows [num_blocks, layers, 2, kv_heads, tokens_per_block, row bytes] of a KV group, written in place."""
        address = None if scales is None else scales.ctypes.data
        self._library.trtforge_host_bind_pool(
            self._host, group, rows.ctypes.data, address, rows.shape[0], rows.shape[1]
        )
        self._pools += [rows] if scales is None else [rows, scales]

    def run(self, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Logits [R, vocab_size] of one step, the host's own memory until the next one.

        arrays: the graph's inputs by name (docs/graph.md), contiguous; the same mapping as before means the same
        arrays with other values, which takes a tenth of the time to pass on. Raises EngineFailure.
        """
        assert len(self._pools) >= self._groups, "bind the pools first"
        if arrays is not self._arrays:
            self._bind(arrays)
        fault = self._library.trtforge_host_run(self._host, byref(self._step), byref(self._logits_at))
        if fault is not None:
            raise EngineFailure(f"the step failed in the native host: {fault.decode()}")
        return self._logits()

    def _bind(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Tell `_step` where these arrays are."""
        _check_sizes(arrays)
        ropes = [arrays[f"cos_sin.{r}"] for r in range(self._ropes)]
        slots = [arrays[f"slot_mapping.{g}"] for g in range(self._groups)]
        tables = [arrays[f"block_tables.{g}"] for g in range(self._groups)]
        self._lists = (  # kept, as the arrays are: the step has their addresses
            _pointers(ropes),
            _numbers([a.shape[1] for a in ropes]),
            _pointers(slots),
            _pointers(tables),
            _numbers([a.shape[1] for a in tables]),
        )
        self._step = _Step(
            len(arrays["token_ids"]),
            len(arrays["kv_lengths"]),
            len(arrays["logit_rows"]),
            *(_address(arrays[name]) for name in ("token_ids", "positions", "query_start", "kv_lengths")),
            _address(arrays["logit_rows"]),
            *(ctypes.addressof(values) for values in self._lists),
        )
        self._arrays = arrays

    def _logits(self) -> NDArray[np.float32]:
        """Of the step that ran last, where they lie; the same array as long as that is the same place."""
        import numpy as np

        place = (self._logits_at.value, self._step.num_logits)
        if place != self._known_place:
            shape = (place[1], self._vocab_size)
            pointer = ctypes.cast(self._logits_at, POINTER(c_float))
            self._known = np.ctypeslib.as_array(pointer, shape) if shape[0] else np.empty(shape, np.float32)
            self._known_place = place
        return self._known

    def close(self) -> None:
        """Stop its threads; safe to call twice."""
        if self._host:
            self._library.trtforge_host_close(self._host)
        self._host = None
        self._pools.clear()

    def _model(self, tokens_per_block: int) -> _Model:
        program = self._program
        embedding, head, first = program.embedding, program.head, program.layers[0].attributes
        layers = (_Layer * len(program.layers))(*map(self._layer, program.layers))
        return _Model(
            hidden=first["hidden_size"],
            num_heads=first["num_heads"],
            num_kv_heads=first["num_kv_heads"],
            head_size=first["head_size"],
            num_layers=len(layers),
            num_groups=self._groups,
            num_ropes=self._ropes,
            kv_dtype=list(KV_DTYPES).index(str(first["kv_dtype"])),
            tokens_per_block=tokens_per_block,
            int8_activations=first["activation_bits"] == 8,
            head_int8_activations=head.attributes["activation_bits"] == 8,
            layers=layers,
            embedding=self._linear(layouts(embedding)["weights"], embedding, "weights"),
            head=self._linear(layouts(head)["weights"], head, "weights"),
            norm=self._constant(head, "norm"),
            embedding_scale=embedding.attributes["scale"],
            logit_softcap=head.attributes["softcap"],
            epsilon=head.attributes["epsilon"],
        )

    def _layer(self, node: Node) -> _Layer:
        n, found = node.attributes, layouts(node)
        return _Layer(
            **{
                name: self._linear(found[f"{name}_weights"], node, f"{name}_weights", f"{name}_bias")
                for name in LAYER_LINEARS
            },
            **{norm: self._constant(node, norm) for norm in _NORMS},
            group=number_of(node.inputs["kv_pool"]),
            layer=n["layer"],
            rope=number_of(node.inputs["cos_sin"]),
            window=n["window"],
            is_gelu=n["activation"] == "gelu_tanh",
            scale=n["scale"],
            softcap=n["softcap"],
            epsilon=n["epsilon"],
        )

    def _linear(self, layout: PackedLayout, node: Node, weights: str, bias: str = "") -> _Linear:
        return _Linear(
            layout.in_features,
            layout.out_features,
            layout.group_size,
            layout.bits,
            layout.zero_point,
            layout.scale_bits // 8,
            layout.has_minimums,
            self._constant(node, weights),
            self._constant(node, bias),
        )

    def _constant(self, node: Node, port: str) -> int | None:
        """Its address; None if the node has none."""
        constant = node.inputs.get(port)
        if constant is None:
            return None
        assert not isinstance(constant, str), (node.name, port)
        return self._address + constant.offset


def _check_sizes(arrays: Mapping[str, NDArray[Any]]) -> None:
    """The host reads as many tokens and sequences of each input as there are of the first."""
    tokens, sequences = len(arrays["token_ids"]), len(arrays["kv_lengths"])
    for name, array in arrays.items():
        if name.startswith(("positions", "cos_sin", "slot_mapping")):
            wanted = tokens
        elif name.startswith("block_tables"):
            wanted = sequences
        else:
            wanted = sequences + 1 if name == "query_start" else len(array)
        if len(array) != wanted:
            raise EngineFailure(f"the step failed: {name} has {len(array)} rows, want {wanted}")


def _address(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    address: int = array.__array_interface__["data"][0]  # a third of the time of .ctypes.data
    return address


def _pointers(arrays: list[NDArray[Any]]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(arrays))(*map(_address, arrays))


def _numbers(values: list[int]) -> ctypes.Array[c_int64]:
    return (c_int64 * len(values))(*values)
