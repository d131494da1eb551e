"""OpenAI's chat API over a policy: HTTP in, ChatSessions below.

What it is: the only OpenAI app of the project. Any program that speaks the API becomes an agent whose tokens are
recorded as they were sampled. What it is not: it knows no reward, runs no tool, and constrains nothing that is sampled.
Behind the extra `serve`.
"""

try:
    from ostinato_rollout.openai_app.app import OpenAIApp
    from ostinato_rollout.openai_app.serving import serving
except ModuleNotFoundError as missing:
    if missing.name not in ("starlette", "uvicorn"):
        raise
    raise ModuleNotFoundError(
        f"{missing.name} must be installed for the OpenAI app; run `pip install 'ostinato-rollout[serve]'`",
        name=missing.name,
    ) from missing

from ostinato_rollout.openai_app.conversations import SessionStore
from ostinato_rollout.openai_app.errors import ApiError, ServeError, UnknownSessionError
from ostinato_rollout.openai_app.limits import AppLimits

__all__ = [
    "ApiError",
    "AppLimits",
    "OpenAIApp",
    "ServeError",
    "SessionStore",
    "UnknownSessionError",
    "serving",
]
