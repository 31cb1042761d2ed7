"""Forward and backward passes on the wire: protobuf as a body for the process of a base model, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from lockstep.service.errors import ServiceError
from lockstep.service.tinker.messages import FLOAT32, INT32, INT64, ForwardBackwardOutput, ForwardBackwardRequest

MAX_DENSE_BYTES = 512 << 20  # sparse tensors of a small body may stand for any number of cells
_DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}
_OUTPUT_TYPE = "ArrayRecord"
_TARGETS = "target_tokens"


def parse_request(data: bytes) -> Any:
    try:
        return ForwardBackwardRequest.FromString(data)
    except DecodeError as error:
        raise ServiceError(f"the body is not a ForwardBackwardRequest: {error}") from None


def as_training_body(request: Any) -> dict[str, Any]:
    """What the process of a base model is sent. All tensors are dense, and of the shape of their datum's targets."""
    if not request.data:
        raise ServiceError("the request holds no data")
    _check_size(request)
    tokens: list[np.ndarray] = []
    shapes: list[list[int]] = []
    inputs: dict[str, list[np.ndarray]] = {}
    for index, datum in enumerate(request.data):
        place = f"datum {index}"
        tokens.append(_read_tokens(datum, place))
        values = _read_inputs(datum, request.loss_fn, len(tokens[-1]), place)
        shapes.append(list(values[_TARGETS].shape))
        if inputs and values.keys() != inputs.keys():
            raise ServiceError(
                f"{place} has the inputs {', '.join(sorted(values))}, and those before it {', '.join(sorted(inputs))}: "
                "give all data of a request the same inputs"
            )
        for name, array in values.items():
            inputs.setdefault(name, []).append(array.reshape(-1))
    return {
        "loss_fn": request.loss_fn,
        "loss_fn_config": _read_config(request),
        "forward_only": request.forward_only,
        "lengths": [len(each) for each in tokens],
        "shapes": shapes,
        "inputs": sorted(inputs),
        "tokens": np.concatenate(tokens).tobytes(),
        **{f"input.{name}": np.concatenate(arrays).tobytes() for name, arrays in inputs.items()},
    }


def write_output(reply: Mapping[str, Any], shapes: list[list[int]]) -> bytes:
    """Neighbours with the same number of targets per token share a record."""
    output = ForwardBackwardOutput(loss_fn_output_type=_OUTPUT_TYPE)
    logprobs = np.frombuffer(reply["logprobs"], dtype="<f4")
    begin = first = 0
    while first < len(shapes):
        trailing, last = shapes[first][1:], first
        while last < len(shapes) and shapes[last][1:] == trailing:
            last += 1
        offsets = np.cumsum([0, *(math.prod(shape) for shape in shapes[first:last])], dtype="<i8")
        record = output.loss_fn_outputs.add(type_tag=_OUTPUT_TYPE, num_datums=last - first)
        field = record.fields["logprobs"]
        field.data = logprobs[begin : begin + int(offsets[-1])].tobytes()
        field.offsets = (offsets * logprobs.itemsize).astype("<i8").tobytes()
        field.dtype = FLOAT32
        field.trailing_shape.extend(trailing)
        begin, first = begin + int(offsets[-1]), last
    for name, value in reply["metrics"].items():
        output.metrics[name if ":" in name else f"{name}:mean"] = value
    return bytes(output.SerializeToString())


def _check_size(request: Any) -> None:
    cells = sum(
        math.prod(tensor.shape) if tensor.HasField("sparse_csr") and min(tensor.shape, default=0) >= 0 else 0
        for datum in request.data
        for tensor in datum.loss_fn_inputs.values()
    )
    if cells * 8 > MAX_DENSE_BYTES:
        raise ServiceError(
            f"the sparse tensors of this request have {cells:,} cells, and one may have {MAX_DENSE_BYTES // 8:,}: "
            "send fewer data at once, or fewer targets for each token"
        )


def _read_tokens(datum: Any, place: str) -> np.ndarray:
    pieces = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            what = {"image": "an image", "dmel": "audio"}.get(kind, "something unknown")
            raise ServiceError(f"{place}: model_input holds {what}, and this server takes text tokens only")
        pieces.append(_as_array(chunk.encoded_text.tokens, _DTYPES[INT32], f"{place}: the tokens of model_input"))
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype="<i4")
    if not len(tokens):
        raise ServiceError(f"{place}: model_input holds no tokens")
    if tokens.min() < 0:
        raise ServiceError(f"{place}: model_input holds the token {tokens.min()}: tokens are not negative")
    return tokens


def _read_inputs(datum: Any, loss_fn: str, length: int, place: str) -> dict[str, np.ndarray]:
    """target_tokens as int64, all others as float32. The weights of cross_entropy are 1 where none are given, and 0 for
    the cells that sparse targets leave out."""
    tensors = datum.loss_fn_inputs
    if _TARGETS not in tensors:
        raise ServiceError(f"{place}: loss_fn_inputs has no {_TARGETS}")
    targets = _read_tensor(tensors[_TARGETS], f"{place}: {_TARGETS}")
    if targets.dtype.kind != "i":
        raise ServiceError(f"{place}: {_TARGETS} are whole numbers: send them as int64")
    if targets.ndim not in (1, 2) or targets.shape[0] != length:
        raise ServiceError(
            f"{place}: {_TARGETS} has the shape {list(targets.shape)}, and model_input {length} tokens: "
            "each token has one target, or a row of them"
        )
    if targets.size and targets.min() < 0:
        raise ServiceError(f"{place}: {_TARGETS} holds {targets.min()}: give it weight 0 and any token instead")
    read = {_TARGETS: targets.astype("<i8", copy=False)}
    for name in sorted(tensors.keys() - {_TARGETS}):
        values = _read_tensor(tensors[name], f"{place}: {name}").astype("<f4", copy=False)
        if values.shape != targets.shape:
            shapes = f"{list(values.shape)}, and {_TARGETS} {list(targets.shape)}"
            raise ServiceError(f"{place}: {name} has the shape {shapes}: give both the same")
        if not np.isfinite(values).all():
            raise ServiceError(f"{place}: {name} holds values that are not finite numbers")
        read[name] = values
    if loss_fn == "cross_entropy" and "weights" not in read:
        sparse = tensors[_TARGETS].HasField("sparse_csr")
        read["weights"] = _listed_cells(tensors[_TARGETS]) if sparse else np.ones(targets.shape, dtype="<f4")
    return read


def _read_config(request: Any) -> dict[str, float | str]:
    """Newer clients write both fields; only the second can hold text."""
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config)
    given = {name: value.WhichOneof("value") for name, value in request.loss_fn_config_v2.items()}
    empty = [name for name, kind in given.items() if kind is None]
    if empty:
        raise ServiceError(f"loss_fn_config: {empty[0]} has no value")
    return {name: getattr(request.loss_fn_config_v2[name], kind) for name, kind in given.items() if kind}


# --- tensors ---------------------------------------------------------------------------------------------------------


def _as_array(data: bytes, dtype: np.dtype[Any], place: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ServiceError(f"{place} come in {len(data):,} bytes, which is no number of {dtype.name} values")
    return np.frombuffer(data, dtype=dtype)


def _read_tensor(tensor: Any, place: str) -> np.ndarray:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ServiceError(f"{place} is neither float32 nor int64")
    if tensor.HasField("sparse_csr"):
        rows, columns, values = _read_cells(tensor, dtype, place)
        dense = np.zeros(tuple(tensor.shape), dtype=dtype)
        dense[rows, columns] = values
        return dense
    values = _as_array(tensor.dense, dtype, f"{place}: its values")
    shape = tuple(tensor.shape) or (len(values),)
    if min(shape) < 0 or math.prod(shape) != len(values):
        raise ServiceError(f"{place} has the shape {list(shape)} and {len(values):,} values")
    return values.reshape(shape)


def _read_cells(tensor: Any, dtype: np.dtype[Any], place: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, column, value) of each cell that is listed."""
    shape, sparse = tuple(tensor.shape), tensor.sparse_csr
    if len(shape) != 2 or min(shape) < 0:
        raise ServiceError(f"{place} is sparse with the shape {list(shape)}: a sparse tensor has two dimensions")
    starts = _as_array(sparse.crow_indices, _DTYPES[INT64], f"{place}: its crow_indices")
    columns = _as_array(sparse.col_indices, _DTYPES[INT64], f"{place}: its col_indices")
    values = _as_array(sparse.values, dtype, f"{place}: its values")
    counts = np.diff(starts)
    fits = len(starts) == shape[0] + 1 and starts[0] == 0 and starts[-1] == len(columns) == len(values)
    if not fits or (counts < 0).any() or (columns < 0).any() or (columns >= shape[1]).any():
        raise ServiceError(f"{place} is sparse, and its crow_indices, col_indices and values do not fit together")
    return np.repeat(np.arange(shape[0]), counts), columns, values


def _listed_cells(tensor: Any) -> np.ndarray:
    rows, columns, _ = _read_cells(tensor, _DTYPES[tensor.dtype], _TARGETS)
    listed = np.zeros(tuple(tensor.shape), dtype="<f4")
    listed[rows, columns] = 1
    return listed
