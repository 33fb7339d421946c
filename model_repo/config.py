"""config.pbtxt from Triton's own protobuf types: what is written is what Triton parses, and nothing can be left
unfilled. The types come with tritonclient (the extra `serve`) and are imported here only.
"""

from collections.abc import Mapping
from typing import Any

from trtforge.model_repo.tensors import INPUTS, OUTPUTS, Kind
from trtforge.plugins.errors import EnvironmentProblem

#: Models that may stream; the other two always answer once.
STREAMING = (Kind.TOKENS, Kind.TEXT, Kind.BLS)

HEADER = "# Written by `trtforge package`; `trtforge check` names what is wrong after a change.\n"


def protobuf() -> tuple[Any, Any]:
    """(model_config_pb2, google.protobuf.text_format)."""
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError as e:
        raise EnvironmentProblem(
            f"Triton's types are not installed ({e.name}); install them with `pip install trtforge[serve]`"
        ) from e
    return model_config_pb2, text_format


def model_name(kind: Kind, prefix: str = "") -> str:
    return f"{prefix}_{kind.value}" if prefix else kind.value


def kind_of(name: str) -> tuple[Kind, str] | None:
    """(kind, prefix) of a model by its name, or None if it is none of ours."""
    for kind in sorted(Kind, key=lambda k: -len(k.value)):  # tensorrt_llm_bls is no tensorrt_llm
        if name == kind.value or name.endswith("_" + kind.value):
            return kind, name.removesuffix(kind.value).removesuffix("_")
    return None


def model_config(
    kind: Kind, *, prefix: str, decoupled: bool, max_batch_size: int, parameters: Mapping[str, str]
) -> Any:
    """The inference.ModelConfig of one model. One instance on the CPU is always written out: without it Triton
    would make one for each GPU, each with an engine of its own."""
    pb, _ = protobuf()
    config = pb.ModelConfig(name=model_name(kind, prefix), backend="python", max_batch_size=max_batch_size)
    for i in INPUTS[kind]:
        # Optional for Triton even if required: the model's own message begins with a code word.
        config.input.add(name=i.name, data_type=data_type(i.dtype), dims=i.dims, optional=True)
    for o in OUTPUTS[kind]:
        config.output.add(name=o.name, data_type=data_type(o.dtype), dims=o.dims)
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_CPU)
    config.model_transaction_policy.decoupled = decoupled and kind in STREAMING
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


def data_type(dtype: str) -> int:
    pb, _ = protobuf()
    return int(pb.DataType.Value(f"TYPE_{dtype}"))


def to_text(config: Any) -> str:
    _, text_format = protobuf()
    return HEADER + str(text_format.MessageToString(config))
