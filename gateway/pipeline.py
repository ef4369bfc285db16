"""The request path: authenticate → (once) → admit → dispatch → (the engine steps) → stream → settle → report.

Nothing else starts work or books money. An admitted request ends in exactly one terminal event, one settled
reservation and one Close to its engine, however it ends: the two contexts see to that on their way out.
"""

from dataclasses import dataclass

from litestar.types import Receive, Scope, Send

from gateway.access import access_of
from gateway.admission import Admission
from gateway.auth import authenticate
from gateway.call import call_of
from gateway.dispatch import CallerLeft, Dispatch
from gateway.errors import as_api_error
from gateway.failures import FailedAttempts
from gateway.idempotency import Idempotency, Replayed
from gateway.schemas import MAX_BODY_BYTES
from gateway.streaming import deliver
from gateway.telemetry import Telemetry
from gateway.work import Kind, Reader
from tenants.directory import Directory


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The parts of the path, in its order."""

    directory: Directory
    failures: FailedAttempts
    reader: Reader
    idempotency: Idempotency
    admission: Admission
    dispatch: Dispatch
    telemetry: Telemetry

    async def serve(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one completion request, streamed or not. Raises ApiError as long as nothing was sent."""
        assert access_of(scope).metered, "only a route that says so may run a model"
        call = call_of(scope).over(receive, send)
        work = flight = error = None
        try:
            principal = await authenticate(self.directory, self.failures, call)
            work = await self.reader.read(kind, await call.body(MAX_BODY_BYTES), principal)
            async with (
                self.idempotency.once(call, work),
                self.admission.admit(call, work) as ticket,
                self.dispatch.open(call, work, ticket) as flight,
            ):
                await deliver(call, work, flight)
        except (CallerLeft, Replayed):
            pass
        except Exception as failure:
            error = as_api_error(failure)
            raise
        finally:
            self.telemetry.report(call, work, flight, error)
