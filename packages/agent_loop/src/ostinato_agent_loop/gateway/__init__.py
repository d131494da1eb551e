"""`gateway_agent`: a program that speaks OpenAI's API, trained on the tokens that it was really answered with.

What it is: an address for each trajectory, behind which every exchange goes through ChatSessions, and the life of the program
that asks there. What it is not: it knows nothing of what the program does. Behind the extra `gateway`.
"""

from ostinato_agent_loop.gateway.address import GatewayAddress, open_address
from ostinato_agent_loop.gateway.agent import GatewayAgentLoop
from ostinato_agent_loop.gateway.program import ProgramResult, run_program
from ostinato_agent_loop.gateway.recording import Recording

__all__ = ["GatewayAddress", "GatewayAgentLoop", "ProgramResult", "Recording", "open_address", "run_program"]
