"""The service slipstream.v1.Admin over the front end."""

import json
from typing import Any

from cluster import codec
from cluster.serving import Serving
from cluster.status import refuse
from protos import slipstream_pb2 as pb
from protos import slipstream_pb2_grpc

RECORD_PART_BYTES = 1 << 20
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Admin"].full_name
VIEW_METHOD = f"/{SERVICE_NAME}/View"  # whose callers may see the live page too


class AdminServicer(slipstream_pb2_grpc.AdminServicer):
    """What operators ask for. A scheduler out of reach is UNAVAILABLE."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def Stats(self, message: Any, context: Any) -> Any:
        """Counters of the scheduler and of this front end."""
        front_end = self._serving.front_end
        try:
            return codec.encode_stats(await front_end.scheduler_stats(), front_end.stats())
        except ConnectionError as error:
            await refuse(context, error)

    async def ResetPrefixCache(self, message: Any, context: Any) -> Any:
        """Answers once the scheduler has been told."""
        try:
            await self._serving.front_end.reset_prefix_cache(reset_running=message.reset_running)
        except ConnectionError as error:
            await refuse(context, error)
        return pb.ResetPrefixCacheResponse()

    async def Preempt(self, message: Any, context: Any) -> Any:
        """Answers once the scheduler has been told."""
        try:
            if not message.request_id:
                raise ValueError("request_id is empty")
            await self._serving.preempt(message.request_id)
        except (ConnectionError, ValueError) as error:
            await refuse(context, error)
        return pb.PreemptResponse()

    async def SwapWeights(self, message: Any, context: Any) -> Any:
        """Answers once every worker has loaded them and the scheduler has been told."""
        try:
            if not message.directory:
                raise ValueError("directory is empty")
            await self._serving.front_end.swap_weights(message.directory)
        except (ConnectionError, ValueError) as error:
            await refuse(context, error)
        return pb.SwapWeightsResponse()

    async def Story(self, message: Any, context: Any) -> Any:
        """Of a live request, or of one of the last few that ended."""
        try:
            text = await self._serving.story(message.request_id)
        except ConnectionError as error:
            await refuse(context, error)
        return pb.StoryResponse(text=text)

    async def View(self, message: Any, context: Any) -> Any:
        """What the live page draws."""
        try:
            view = await self._serving.front_end.view(message.after, frames=message.frames)
        except ConnectionError as error:
            await refuse(context, error)
        return pb.ViewResponse(json=json.dumps(view).encode())

    async def Record(self, message: Any, context: Any) -> Any:
        """The scheduler's log in parts."""
        try:
            content = await self._serving.front_end.recording()
        except (ConnectionError, ValueError) as error:
            await refuse(context, error)
        for start in range(0, len(content), RECORD_PART_BYTES):
            yield pb.RecordResponse(content=content[start : start + RECORD_PART_BYTES])
