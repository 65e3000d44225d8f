"""The service slipstream.v1.Inference over the front end."""

from contextlib import aclosing
from typing import Any

from cluster import codec
from cluster.call import Call, StreamError, choice_seed
from cluster.codec import Received, Start
from cluster.guard import current_caller
from cluster.serving import Serving
from cluster.status import refuse, timeout_of, traceparent_of
from protos import slipstream_pb2 as pb
from protos import slipstream_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name


class InferenceServicer(slipstream_pb2_grpc.InferenceServicer):
    """One stream per request; one message per choice and whatever became ready of it."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def Generate(self, message: Any, context: Any) -> None:
        """Streams until every choice ended. The client leaving cancels the request."""
        try:
            request = codec.decode_generate_request(message, timeout_of(context))
            call = await self._serving.open(request, traceparent=traceparent_of(context))
            await self._stream(call, context)
        except (ValueError, StreamError) as error:
            await refuse(context, error)

    async def _stream(self, call: Call, context: Any) -> None:
        started = [False] * call.request.n
        # Written, not yielded: a generator suspended at a yield would hear of a cancel only when collected.
        async with aclosing(self._serving.front_end.outputs(call)) as outputs:
            async for output in outputs:
                start = None if started[output.index] else _start(call, output.index)
                started[output.index] = True
                await self._serving.write(context, codec.encode_received(Received(output=output, start=start)))

    async def Cancel(self, message: Any, context: Any) -> Any:
        """Answers once the scheduler has been told."""
        return pb.CancelResponse(found=await self._serving.cancel(message.request_id))


def _start(call: Call, index: int) -> Start:
    return Start(
        request_id=current_caller().unscoped(call.request.request_id),
        seed=call.seed,
        choice_seed=choice_seed(call.seed, index, call.request.n),
        num_prompt_tokens=len(call.request.prompt_token_ids),
        fingerprint=call.choices[index].fingerprint or "",
    )
