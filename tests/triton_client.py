"""NVIDIA's own client of the Triton protocol, for tests.

Runs in a process of its own: its copy of the protocol's messages cannot live in one process with the server's.
"""

import json
import queue
from typing import Any


def _inputs(text: str, stream: bool, sampling: dict[str, Any]) -> list[Any]:
    import numpy as np
    import tritonclient.grpc as triton

    values = (
        ("text_input", "BYTES", np.array([text.encode()], object)),
        ("stream", "BOOL", np.array([stream])),
        ("sampling_parameters", "BYTES", np.array([json.dumps(sampling).encode()], object)),
    )
    inputs = []
    for name, datatype, value in values:
        inputs.append(triton.InferInput(name, [1], datatype))
        inputs[-1].set_data_from_numpy(value)
    return inputs


def _client(address: str) -> Any:
    import tritonclient.grpc as triton

    return triton.InferenceServerClient(address)


def describe(address: str, model: str) -> dict[str, Any]:
    """What the server says of itself and of a model."""
    with _client(address) as client:
        return {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model_ready": client.is_model_ready(model),
            "server": client.get_server_metadata(as_json=True),
            "model": client.get_model_metadata(model, as_json=True),
        }


def infer(address: str, model: str, text: str, sampling: dict[str, Any]) -> str:
    """The text_output of one request; what the client raises instead, as text."""
    from tritonclient.utils import InferenceServerException

    with _client(address) as client:
        try:
            result = client.infer(model, _inputs(text, False, sampling), request_id="whole")
        except InferenceServerException as error:
            return f"{error.status()}: {error.message()}"
        [element] = result.as_numpy("text_output")
        return str(element.decode())


def stream(
    address: str, model: str, asked: dict[str, tuple[str, dict[str, Any]]], leave_after: int | None = None
) -> dict[str, list[str]]:
    """The texts and errors of requests {id: (text, sampling)} on one stream, until all have ended.

    leave_after: so many responses, of all requests; the client then cancels the stream.
    """
    responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
    received: dict[str, list[str]] = {name: [] for name in asked}
    num_open, num_left = len(asked), leave_after
    with _client(address) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        for name, (text, sampling) in asked.items():
            inputs = _inputs(text, True, sampling)
            client.async_stream_infer(model, inputs, request_id=name, enable_empty_final_response=True)
        while num_open and num_left != 0:
            result, error = responses.get(timeout=60)
            if error is not None:
                received.setdefault("errors", []).append(error.message())
                num_open -= 1
                continue
            response = result.get_response()
            received[response.id].append(result.as_numpy("text_output")[0].decode())
            num_open -= response.parameters["triton_final_response"].bool_param
            num_left = None if num_left is None else num_left - 1
        client.stop_stream(cancel_requests=leave_after is not None)
    return received
