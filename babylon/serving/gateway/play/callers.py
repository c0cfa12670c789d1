"""The caller of each call: its agent by the key's rights, and a trajectory of its own."""

from collections.abc import Iterable
from dataclasses import replace

from babylon.serving.gateway.auth import Principal
from babylon.serving.gateway.exchange import Identity, ModelRequest
from babylon.serving.gateway.play.owners import TrajectoryOwners
from babylon.serving.gateway.play.sessions import Sessions
from babylon.serving.openai_wire import ChatRequest


class Callers:
    """Finds the caller of a call. ``sessions``: None if they are not recognised. Calls of a version
    by its name, such as a deployment's checks, are no session either.
    """

    def __init__(self, owners: TrajectoryOwners, sessions: Sessions | None, alias: str) -> None:
        self._owners, self._sessions, self._alias = owners, sessions, alias

    async def identify(
        self, headers: Iterable[tuple[bytes, bytes]], asked: ModelRequest, principal: Principal
    ) -> Identity:
        """Return the caller.

        Raises:
            RequestError: 400, a header cannot be used; 403, the agent or the trajectory is not the
                key's.
        """
        identity = Identity.of(headers, principal.agent_of(asked.user))
        agent_id, named = principal.attributed_agent(identity.agent_id), identity.trajectory_id
        if named is not None:  # an agent's rules hold for calls that name its trajectory alone
            agent_id = await self._owners.require(named, principal.key_id, agent_id)
        if agent_id != identity.agent_id:
            identity = replace(identity, agent_id=agent_id)
        if named is not None or not self._sessions or asked.model != self._alias:
            return identity
        if isinstance(asked, ChatRequest):
            session = await self._sessions.find(principal.key_id, agent_id, asked.messages)
            return replace(identity, trajectory_id=session.trajectory_id, session=session)
        return identity
