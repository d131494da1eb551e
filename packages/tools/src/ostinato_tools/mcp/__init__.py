"""Tools that live on servers of the Model Context Protocol, over stdio and streamable HTTP (extra `mcp`).

What it is: `load_tools` reads entries of `config: {type: mcp}`, asks the servers for their tools, and registers each as an
`McpTool`; one session serves all trajectories, or each trajectory has its own. Connections live in a thread of their own,
so that no event loop of the caller owns them, and end with `close_mcp_servers()` or with the process.

What it is not: no server, and only the tools of the protocol: no prompts, no sampling for servers, no questions to the user.
A stdio server runs on this machine with the rights of this process; it is no sandbox.
"""

from ostinato_tools.mcp.config import SessionScope
from ostinato_tools.mcp.results import McpResult
from ostinato_tools.mcp.server import close_mcp_servers
from ostinato_tools.mcp.tool import McpTool

__all__ = ["McpResult", "McpTool", "SessionScope", "close_mcp_servers"]
