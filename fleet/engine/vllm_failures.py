"""vLLM's exceptions as ours."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from asyppo_async.fleet.engine.protocol import EngineDead, EngineFault, EngineRefused


@dataclass(frozen=True, slots=True)
class Failures:
    """vLLM's exceptions; imported with vLLM, not with this module. Made by `vllm_failures`."""

    dead: type[Exception]
    generate: type[Exception]
    refused: type[Exception]

    @contextlib.contextmanager
    def translated(self, request_id: str) -> Iterator[None]:
        """Around what vLLM does for one request."""
        try:
            yield
        except self.dead as error:
            raise EngineDead(f"request {request_id}: vLLM's engine process died") from error
        except self.generate as error:
            cause = error.__cause__ or error
            raise EngineFault(f"request {request_id}: {type(cause).__name__}: {cause}") from error
        except (self.refused, ValueError) as error:
            raise EngineRefused(f"request {request_id}: {error}") from error


def vllm_failures() -> Failures:
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    return Failures(EngineDeadError, EngineGenerateError, VLLMClientError)
