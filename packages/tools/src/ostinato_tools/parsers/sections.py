"""Formats whose calls stand in a section: `<section> <call> ... </call> <call> ... </call> </section>`.

The tags around the section carry nothing, so calls are read without them, too. A section without a call is an error.
"""

from abc import abstractmethod

from ostinato_tools.parsers.grammar import TagFormat
from ostinato_tools.parsers.scanning import Tags
from ostinato_tools.parsers.turn import Steps, Turn


class SectionFormat(TagFormat):
    """A format of this kind; a subclass supplies the tags and reads one call."""

    section: tuple[str, str]
    """The tags around a section."""
    call: tuple[str, str]
    """The tags around a call."""

    def __init__(self) -> None:
        self.openers = (self.section[0], self.call[0])
        self.closers = (self.section[1], self.call[1])
        super().__init__()
        self._next = Tags(self.call[0], self.section[1])

    @abstractmethod
    def read_one(self, turn: Turn) -> Steps[None]:
        """Read the call whose opening tag ends at the position, and go behind its closing tag."""

    def read_call(self, turn: Turn, opener: str) -> Steps[None]:
        """Read a section, or calls that stand in none."""
        tag = opener
        if opener == self.section[0]:
            start = yield from turn.skip_space(turn.position)
            tag = yield from turn.tag_at(self._next, start)
            if tag != self.call[0]:
                turn.add_error(f"{opener} must be followed by {self.call[0]}; write a call or no section")
            turn.position = start + len(tag)
        while tag == self.call[0]:
            yield from self.read_one(turn)
            start = yield from turn.skip_space(turn.position)
            tag = yield from turn.tag_at(self._next, start)
            turn.position = start + len(tag)
