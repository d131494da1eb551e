"""OpenAI's chat API over a policy: HTTP in, ChatSessions below.

What it is: the only OpenAI app of the project. Any program that speaks the API becomes an agent whose tokens are
recorded as they were sampled. What it is not: it knows no reward, runs no tool, and constrains nothing that is sampled.
Behind the extra `serve`.
"""

from ostinato_engines import MissingDependencyError

try:
    from ostinato_rollout.openai_app.app import OpenAIApp, OpenChat, Proceed, TakePost, Watch
    from ostinato_rollout.openai_app.delivery import error_response
    from ostinato_rollout.openai_app.serving import Served, serving
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("starlette", "uvicorn"):
        raise
    raise MissingDependencyError(
        f"{error.name} must be installed for the OpenAI app; run `pip install 'ostinato-rollout[serve]'`"
    ) from error

from ostinato_rollout.openai_app.answers import Answer
from ostinato_rollout.openai_app.conversations import SessionStore
from ostinato_rollout.openai_app.errors import ApiError, ServeError, UnknownSessionError, as_api_error
from ostinato_rollout.openai_app.limits import AppLimits
from ostinato_rollout.openai_app.request import ChatRequest, decoded, schema_error

__all__ = [
    "Answer",
    "ApiError",
    "AppLimits",
    "ChatRequest",
    "OpenAIApp",
    "OpenChat",
    "Proceed",
    "ServeError",
    "Served",
    "SessionStore",
    "TakePost",
    "UnknownSessionError",
    "Watch",
    "as_api_error",
    "decoded",
    "error_response",
    "schema_error",
    "serving",
]
