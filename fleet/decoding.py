"""Bytes that are no message are the caller's mistake; gRPC itself would call them an unknown failure of the server."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError


class DecodeCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Next to the handlers, so that a caller without a token learns nothing of messages."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        decode = handler.request_deserializer
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )

        async def handle(data: bytes, context: Any) -> Any:
            try:
                request = decode(data)
            except DecodeError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the bytes are no message: {error}")
            return await inner(request, context)

        return make(handle, response_serializer=handler.response_serializer)
