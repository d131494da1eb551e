"""Keeping configured secrets out of messages and logs.

Every value of `env`, `headers`, `auth_token` and every credential inside a URL counts as a secret. What *servers* write into
the results of their tools is theirs and is not touched.
"""

import logging
from collections.abc import Iterable
from urllib.parse import parse_qsl, quote, unquote, urlsplit

_MASK = "***"
_MIN_LENGTH = 4
"""Shorter values, such as `1` or `yes`, hide nothing and would blot out half of every message."""
_FOREIGN_LOGGERS = (
    "httpx2",
    "mcp.client.client",
    "mcp.client.session",
    "mcp.client.streamable_http",
    "mcp.shared.jsonrpc_dispatcher",
)


class Redactor:
    """Replaces secrets in texts."""

    def __init__(self, values: Iterable[str]) -> None:
        found: set[str] = set()
        for value in values:
            for part in (value, *value.split()):  # "Bearer abc" is as secret as "abc"
                found.update((part, quote(part, safe=""), repr(part)[1:-1]))
        self._secrets = sorted((part for part in found if len(part) >= _MIN_LENGTH), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Return `text` with every secret masked, the longest first."""
        for secret in self._secrets:
            text = text.replace(secret, _MASK)
        return text


def url_secrets(url: str) -> list[str]:
    """Return the credentials inside a URL: user, password, and the values of its query."""
    parts = urlsplit(url)
    query = [value for _, value in parse_qsl(parts.query)]
    raw_query = [pair.partition("=")[2] for pair in parts.query.split("&")]
    userinfo = [value for value in (parts.username, parts.password) if value]
    return [value for value in (*userinfo, *map(unquote, userinfo), *query, *raw_query) if value]


class _RedactingFilter(logging.Filter):
    """Masks the secrets of all known servers in records of the libraries underneath, which log URLs and bodies."""

    def __init__(self) -> None:
        super().__init__()
        self.redactors: set[Redactor] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        masked = self._mask(text)
        if masked != text:
            record.msg, record.args = masked, ()
        if record.exc_info:
            trace = logging.Formatter().formatException(record.exc_info)  # type: ignore[arg-type] - logging fills it in
            masked_trace = self._mask(trace)
            if masked_trace != trace:
                record.exc_info, record.exc_text = None, masked_trace
        return True

    def _mask(self, text: str) -> str:
        for redactor in tuple(self.redactors):
            text = redactor(text)
        return text


_FILTER = _RedactingFilter()


def guard_logs(redactor: Redactor) -> None:
    """Mask the secrets of `redactor` in the logs of the libraries underneath, from now on."""
    _FILTER.redactors.add(redactor)
    for name in _FOREIGN_LOGGERS:
        logging.getLogger(name).addFilter(_FILTER)  # adding it again changes nothing
