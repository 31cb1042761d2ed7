"""The Tinker API's messages: the same as the client's, and what they mean for the process of a base model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinker
import torch
from google.protobuf import descriptor_pb2
from tinker.proto import tinker_public_pb2 as theirs
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from lockstep.service.errors import ServiceError
from lockstep.service.tinker.forward_backward import as_training_body, parse_request, write_output
from lockstep.service.tinker.messages import describe_file
from lockstep.service.tinker.sampling import as_sample_body, write_response
from lockstep.service.tinker.schemas import AskedSample, read


def test_every_message_and_field_is_the_clients():
    client = descriptor_pb2.FileDescriptorProto()
    theirs.DESCRIPTOR.CopyToProto(client)
    ours = describe_file()
    assert (ours.package, ours.syntax) == (client.package, client.syntax)
    known = {message.name: message for message in client.message_type}
    for message in ours.message_type:
        fields = {field.name: field for field in known[message.name].field}
        entries = {entry.name: entry for entry in known[message.name].nested_type}
        for field in message.field:
            assert shown(field, message) == shown(fields[field.name], known[message.name])
        for entry in message.nested_type:
            assert entry.SerializeToString() == entries[entry.name].SerializeToString(), entry.name
    enums = {enum.name: {value.name: value.number for value in enum.value} for enum in client.enum_type}
    for enum in ours.enum_type:
        assert {value.name: value.number for value in enum.value} == enums[enum.name]


def shown(field: Any, message: Any) -> tuple[Any, ...]:
    """All of a field but the place of its oneof in the list, and the name that only JSON uses."""
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
    return (
        message.name,
        field.name,
        field.number,
        field.type,
        field.label,
        field.type_name,
        oneof,
        field.proto3_optional,
    )


def request_of(*data: tinker.Datum, loss: str = "cross_entropy", config: dict[str, Any] | None = None) -> Any:
    """As it arrives, from what the client writes."""
    inner = tinker.types.ForwardBackwardInput(data=list(data), loss_fn=loss, loss_fn_config=config)
    request = tinker.types.ForwardBackwardRequest(forward_backward_input=inner, model_id="m", seq_id=1)
    return parse_request(forward_backward_request_to_proto(request).SerializeToString())


def datum(tokens: list[int], **inputs: Any) -> tinker.Datum:
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def floats(body: dict[str, Any], name: str) -> list[float]:
    return np.frombuffer(body[f"input.{name}"], dtype="<f4").tolist()


def test_dense_tensors_and_weights_that_are_missing():
    body = as_training_body(request_of(datum([1, 2, 3], target_tokens=[2, 3, 4]), datum([5], target_tokens=[6])))
    assert body["lengths"] == [3, 1]
    assert body["shapes"] == [[3], [1]]
    assert body["inputs"] == ["target_tokens", "weights"]
    assert np.frombuffer(body["tokens"], dtype="<i4").tolist() == [1, 2, 3, 5]
    assert np.frombuffer(body["input.target_tokens"], dtype="<i8").tolist() == [2, 3, 4, 6]
    assert floats(body, "weights") == [1, 1, 1, 1]
    given = as_training_body(request_of(datum([1, 2], target_tokens=[2, 3], weights=[0.0, 0.5])))
    assert floats(given, "weights") == [0, 0.5]
    other = as_training_body(
        request_of(datum([1], target_tokens=[2], logprobs=[-1.0], advantages=[2.0]), loss="importance_sampling")
    )
    assert other["inputs"] == ["advantages", "logprobs", "target_tokens"]


def test_sparse_cells_that_are_not_listed_are_token_0_of_weight_0():
    targets = torch.tensor([[0, 7, 0, 0, 0, 0], [0, 0, 0, 0, 0, 9]])
    weights = torch.tensor([[0, 0.5, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0.25]])
    sparse = tinker.TensorData.from_torch_sparse
    assert sparse(targets).sparse_crow_indices is not None
    body = as_training_body(request_of(datum([1, 2], target_tokens=sparse(targets), weights=sparse(weights))))
    assert body["shapes"] == [[2, 6]]
    assert np.frombuffer(body["input.target_tokens"], dtype="<i8").tolist() == targets.reshape(-1).tolist()
    assert floats(body, "weights") == weights.reshape(-1).tolist()
    alone = as_training_body(request_of(datum([1, 2], target_tokens=sparse(targets))))
    assert floats(alone, "weights") == (targets != 0).float().reshape(-1).tolist()


def test_settings_of_a_loss_may_be_text():
    body = as_training_body(request_of(datum([1], target_tokens=[2]), config={"clip": 0.2, "mode": "a"}))
    assert body["loss_fn_config"] == {"clip": 0.2, "mode": "a"}


def broken(change: str) -> Any:
    """A request that the client would not write."""
    request = request_of(datum([1, 2], target_tokens=[2, 3], weights=[1.0, 1.0]))
    one = request.data[0]
    match change:
        case "no data":
            del request.data[:]
        case "no tokens":
            del one.model_input[:]
        case "an image":
            one.model_input.add().image.data = b"png"
        case "audio":
            one.model_input.add().dmel.dmel = b"wav"
        case "no number of int32":
            one.model_input[0].encoded_text.tokens = b"123"
        case "not negative":
            one.model_input[0].encoded_text.tokens = np.asarray([1, -2], dtype="<i4").tobytes()
        case "no target_tokens":
            del one.loss_fn_inputs["target_tokens"]
        case "whole numbers":
            one.loss_fn_inputs["target_tokens"].CopyFrom(one.loss_fn_inputs["weights"])
        case "and model_input 2 tokens":
            one.loss_fn_inputs["target_tokens"].dense = np.asarray([1], dtype="<i8").tobytes()
            del one.loss_fn_inputs["target_tokens"].shape[:]
        case "weight 0":
            one.loss_fn_inputs["target_tokens"].dense = np.asarray([1, -100], dtype="<i8").tobytes()
        case "the same":
            one.loss_fn_inputs["weights"].dense = np.asarray([1.0], dtype="<f4").tobytes()
            del one.loss_fn_inputs["weights"].shape[:]
        case "not finite":
            one.loss_fn_inputs["weights"].dense = np.asarray([1.0, np.nan], dtype="<f4").tobytes()
        case "neither float32 nor int64":
            one.loss_fn_inputs["weights"].dtype = 4
        case "and 2 values":
            one.loss_fn_inputs["weights"].shape[:] = [3]
        case "the same inputs":
            request.data.add().CopyFrom(one)
            request.data[1].loss_fn_inputs["advantages"].CopyFrom(one.loss_fn_inputs["weights"])
        case "two dimensions":
            one.loss_fn_inputs["weights"].sparse_csr.values = b""
        case "do not fit together":
            tensor = one.loss_fn_inputs["weights"]
            tensor.sparse_csr.values = np.asarray([1.0], dtype="<f4").tobytes()
            tensor.sparse_csr.crow_indices = np.asarray([0, 1, 1], dtype="<i8").tobytes()
            tensor.sparse_csr.col_indices = np.asarray([5], dtype="<i8").tobytes()
            tensor.shape[:] = [2, 5]
        case "cells":
            one.loss_fn_inputs["weights"].sparse_csr.values = b""
            one.loss_fn_inputs["weights"].shape[:] = [2, 1 << 40]
        case "has no value":
            request.loss_fn_config_v2["clip"].SetInParent()
    return request


@pytest.mark.parametrize(
    "sentence",
    [
        *("no data", "no tokens", "an image", "audio", "no number of int32", "not negative", "no target_tokens"),
        *("whole numbers", "and model_input 2 tokens", "weight 0", "the same", "not finite"),
        *("neither float32 nor int64", "and 2 values", "the same inputs", "two dimensions", "do not fit together"),
        *("cells", "has no value"),
    ],
)
def test_what_is_wrong_with_data_is_said(sentence):
    with pytest.raises(ServiceError, match=sentence):
        as_training_body(broken(sentence))


def test_bytes_that_are_no_request():
    with pytest.raises(ServiceError, match="not a ForwardBackwardRequest"):
        parse_request(b"\xff\xff\xff")


def test_the_client_reads_log_probs_of_any_shapes():
    shapes = [[2], [1], [2, 3], [1, 2], [3, 2]]
    values = np.arange(sum(int(np.prod(shape)) for shape in shapes), dtype="<f4")
    reply = {"logprobs": memoryview(values.tobytes()), "metrics": {"loss:sum": 2.0, "norm": 1.0}}
    output = deserialize_forward_backward_output(write_output(reply, shapes))
    assert [each["logprobs"].shape for each in output.loss_fn_outputs] == shapes
    assert np.concatenate([each["logprobs"].data for each in output.loss_fn_outputs]).tolist() == values.tolist()
    assert output.metrics == {"loss:sum": 2.0, "norm:mean": 1.0}


def asked(**fields: Any) -> AskedSample:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]}
    fields.setdefault("sampling_params", {})
    return read(AskedSample, {"sampling_session_id": "s", "seq_id": 0, "prompt": prompt, **fields})


@pytest.mark.parametrize(
    ("stop", "texts", "tokens", "ignore_eos"),
    [
        (None, [], [], False),
        ("x", ["x"], [], False),
        (["x", "y"], ["x", "y"], [], False),
        ([1, 2], [], [1, 2], False),
        ([], [], [], True),
    ],
)
def test_what_ends_a_sample(stop, texts, tokens, ignore_eos):
    body = as_sample_body(asked(sampling_params={"stop": stop}))
    assert (body["stop"], body["stop_tokens"], body["ignore_eos"]) == (texts, tokens, ignore_eos)
    assert np.frombuffer(body["prompt"], dtype="<i4").tolist() == [1, 2, 3]


def test_the_client_reads_samples():
    request = asked(prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=1, num_samples=2)
    sequence = {"stop_reason": "stop", "tokens": [4, 5], "logprobs": [-1.0, -2.0], "topk": [[[4, -1.0]], []]}
    reply = {
        "sequences": [sequence, {**sequence, "stop_reason": "length"}],
        "prompt_logprobs": np.asarray([np.nan, -1, -2], dtype="<f4").tobytes(),
        "topk_prompt": [[], [[2, -1.0], [9, -3.0]], [[3, -2.0]]],
    }
    response = deserialize_sample_response(write_response(reply, request))
    assert [each.stop_reason for each in response.sequences] == ["stop", "length"]
    assert list(response.sequences[0].tokens) == [4, 5]
    assert list(response.sequences[0].logprobs) == [-1.0, -2.0]
    assert response.sequences[0].topk_logprobs_np.token_ids.tolist() == [[4], [0]]
    assert response.sequences[0].topk_logprobs_np.logprobs.tolist() == [[-1.0], [-99999.0]]
    assert response.prompt_logprobs == [None, -1.0, -2.0]
    assert response.topk_prompt_logprobs_np.token_ids.tolist() == [[0, 0], [2, 9], [3, 0]]
    last = asked(prompt_logprobs=True, prompt_logprobs_last_n=1)
    assert deserialize_sample_response(write_response(reply, last)).prompt_logprobs == [None, None, -2.0]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sampling_params": {"stop": [1, "x"]}}, "a text, a list of texts or a list of tokens"),
        ({"sampling_params": {"stop": [True]}}, "a text, a list of texts or a list of tokens"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"temperature": float("nan")}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"max_tokens": "many"}}, "sampling_params.max_tokens"),
        ({"num_samples": 0}, "num_samples"),
        ({"prompt": {"chunks": []}}, "no tokens"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [-1]}]}}, "prompt.chunks.0.tokens.0"),
        ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "type image"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not offered"),
        ({"target_prompt_logprobs": {"data": []}}, "target_prompt_logprobs is not offered"),
        ({"record_stability_info": True}, "record_stability_info is not offered"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n"),
    ],
)
def test_what_is_wrong_with_a_sample_is_said(fields, sentence):
    with pytest.raises(ServiceError, match=sentence):
        as_sample_body(asked(**fields))
