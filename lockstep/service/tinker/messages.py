"""The protobuf messages of the Tinker API that a server reads or writes, made from a table."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"
# Message: number, field, type. `*` repeated, `?` optional, `|name` one of the fields with this name, `{}` a map from
# strings. Fields that are not here are kept unread.
_TABLE = """
SampleResponse: 1 sequences SampledSequence*, 2 prompt_logprobs bytes?, 3 topk_prompt_logprobs TopkLogprobs?
SampledSequence: 1 stop_reason StopReason, 2 tokens bytes, 3 logprobs bytes?, 4 topk_sampled_logprobs TopkLogprobs?
TopkLogprobs: 1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32
SparseCsr: 1 values bytes, 2 crow_indices bytes, 3 col_indices bytes
Tensor: 1 dense bytes|encoding, 2 sparse_csr SparseCsr|encoding, 3 dtype DType, 4 shape int64*
BatchedTensor: 1 data bytes, 2 offsets bytes, 3 dtype DType, 4 trailing_shape int64*
ArrayRecord: 1 type_tag string, 2 fields BatchedTensor{}, 3 num_datums int64
ForwardBackwardOutput: 1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics double{}
ForwardBackwardRequest: 1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, 5 loss_fn_config double{}
ForwardBackwardRequest: 6 forward_only bool, 7 loss_fn_config_v2 LossConfigValue{}
LossConfigValue: 1 number double|value, 2 text string|value
Datum: 1 model_input Chunk*, 2 loss_fn_inputs Tensor{}
Chunk: 1 encoded_text EncodedTextChunk|chunk, 2 image ImageChunk|chunk, 3 dmel DmelChunk|chunk
EncodedTextChunk: 1 tokens bytes
ImageChunk: 1 data bytes
DmelChunk: 1 dmel bytes
"""
_ENUMS = {
    "StopReason": {"STOP_REASON_STOP": 0, "STOP_REASON_LENGTH": 1},
    "DType": {
        "DTYPE_UNSPECIFIED": 0,
        "DTYPE_FLOAT32": 1,
        "DTYPE_INT64": 2,
        "DTYPE_INT32": 3,
        "DTYPE_BFLOAT16": 4,
    },
}
_Field = descriptor_pb2.FieldDescriptorProto


def _set_type(field: Any, kind: str) -> None:
    if kind in _ENUMS:
        field.type, field.type_name = _Field.TYPE_ENUM, f".{PACKAGE}.{kind}"
    elif kind[0].isupper():
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = getattr(_Field, f"TYPE_{kind.upper()}")


def _add_field(message: Any, number: int, name: str, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    kind, _, choice = kind.partition("|")
    if kind.endswith("?"):
        choice, field.proto3_optional = f"_{name}", True
    if choice:
        names = [oneof.name for oneof in message.oneof_decl]
        if choice not in names:
            message.oneof_decl.add(name=choice)
            names.append(choice)
        field.oneof_index = names.index(choice)
    if kind.endswith("*"):
        field.label = _Field.LABEL_REPEATED
    if not kind.endswith("{}"):
        _set_type(field, kind.rstrip("?*"))
        return
    field.label = _Field.LABEL_REPEATED
    entry = message.nested_type.add(name="".join(word.capitalize() for word in name.split("_")) + "Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
    _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind[:-2])
    field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{message.name}.{entry.name}"


def describe_file() -> Any:
    """The FileDescriptorProto of the table."""
    file = descriptor_pb2.FileDescriptorProto(name="lockstep/tinker.proto", package=PACKAGE, syntax="proto3")
    messages: dict[str, Any] = {}
    for line in _TABLE.strip().splitlines():
        name, _, fields = line.partition(": ")
        if name not in messages:
            messages[name] = file.message_type.add(name=name)
        for field in fields.split(", "):
            number, field_name, kind = field.split()
            _add_field(messages[name], int(number), field_name, kind)
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for value_name, value in values.items():
            enum.value.add(name=value_name, number=value)
    return file


def _make_classes() -> dict[str, Any]:
    """In a pool of their own: the client's, in the same process, have the same names."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(describe_file().SerializeToString())
    names = [message.name for message in describe_file().message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in names}


_CLASSES = _make_classes()
ForwardBackwardRequest = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput = _CLASSES["ForwardBackwardOutput"]
SampleResponse = _CLASSES["SampleResponse"]
FLOAT32, INT64, INT32 = (_ENUMS["DType"][f"DTYPE_{name}"] for name in ("FLOAT32", "INT64", "INT32"))
STOP_REASONS = {"stop": _ENUMS["StopReason"]["STOP_REASON_STOP"], "length": _ENUMS["StopReason"]["STOP_REASON_LENGTH"]}
