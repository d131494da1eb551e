"""Scanning: tags in text, and the ends of JSON in text. Every scan knows where text that has yet to come could change it.

Nothing here backtracks: the regular expressions are possessive or plain alternatives of literals.
"""

import re

_RUN = re.compile(r'(?:[^"\\<]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
"""Text up to an unclosed string, or to a `<` or backslash outside of a string."""
_IN_STRING = re.compile(r"(?:[^\"\\]++|\\.)*+", re.DOTALL)
"""The rest of a string, up to its quote."""
_FLAT = re.compile(r'(?:[\s0-9+\-.,:eEtrufalsn]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
"""JSON up to a bracket, an unclosed string, or what stands in no JSON outside of a string."""
_OPENING = re.compile(r"[\[{]++")
_CLOSING = re.compile(r"[\]}]++")


class Tags:
    """A closed set of tags to look for. None may be part of another, so that the first one found is the one meant."""

    def __init__(self, *tags: str) -> None:
        tags = tuple(dict.fromkeys(tags))
        for tag in tags:
            if not tag or any(tag in other for other in tags if other != tag):
                raise ValueError(f"tags must not be empty or part of one another, got {tag!r} among {tags}; rename one")
        self.longest = max(map(len, tags))
        self._pattern = re.compile("|".join(map(re.escape, tags)))
        self._starts = frozenset(tag[:length] for tag in tags for length in range(1, len(tag)))
        self.search = self._pattern.search
        self.match = self._pattern.match

    def holds(self, text: str, start: int) -> int:
        """Return where, not before `start`, a tag may have begun that `text` does not yet hold whole; its end if none."""
        length = len(text)
        for at in range(max(start, length - self.longest + 1), length):
            if text[at:] in self._starts:
                return at
        return length


class JsonRun:
    """Finds where text stops that could be JSON inside of a tag: at a `<` or backslash outside of a string.

    Told to go on with more of the same text, it goes on where it was, so that all steps together cost one pass.
    """

    __slots__ = ("_in_string", "end")

    def __init__(self, start: int) -> None:
        self.end = start
        """How far it is certain; where a string is not closed, its quote."""
        self._in_string = 0  # where to go on in a string; 0 outside of one

    def advance(self, text: str) -> bool:
        """Go on as far as `text` goes, and tell whether the end is found."""
        while True:
            if self._in_string:
                at = _end_of(_IN_STRING, text, self._in_string)
                if at >= len(text) or text[at] != '"':  # a lone backslash waits for what it escapes
                    self._in_string = at
                    return False
                self._in_string, self.end = 0, at + 1
            self.end = _end_of(_RUN, text, self.end)
            if self.end >= len(text):
                return False
            if text[self.end] != '"':
                return True
            self._in_string = self.end + 1


class JsonValue:
    """Finds the end of a JSON object or array that begins at `start`, by its brackets.

    It stops, incomplete, at what stands in no JSON outside of a string. Kinds of brackets are not compared: decoding does.
    Like `JsonRun`, it goes on where it was.
    """

    __slots__ = ("_depth", "_in_string", "complete", "end")

    def __init__(self, start: int) -> None:
        self.end = start
        """The end of the value if `complete`, else how far it could be one (in an unclosed string: its quote)."""
        self.complete = False
        self._depth = 0
        self._in_string = 0

    def advance(self, text: str) -> bool:
        """Go on as far as `text` goes, and tell whether the end is found, one way or the other."""
        length = len(text)
        while not self.complete:
            if self._in_string:
                at = _end_of(_IN_STRING, text, self._in_string)
                if at >= length or text[at] != '"':
                    self._in_string = at
                    return False
                self._in_string, self.end = 0, at + 1
            if self._depth:
                self.end = _end_of(_FLAT, text, self.end)
            if self.end >= length:
                return False
            char = text[self.end]
            if char in "[{":
                run = _end_of(_OPENING, text, self.end)
                self._depth += run - self.end
                self.end = run
            elif char in "]}" and self._depth:
                run = min(_end_of(_CLOSING, text, self.end), self.end + self._depth)
                self._depth -= run - self.end
                self.end = run
                self.complete = self._depth == 0
            elif char == '"' and self._depth:
                self._in_string = self.end + 1
            else:
                return True
        return True


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match is not None else start
