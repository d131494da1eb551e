"""Where an event loop is, told from another thread: for one that stands still because something in it does not suspend."""

from __future__ import annotations

import asyncio
import sys
import traceback

_MAX_FRAMES = 12


def task_running(loop: asyncio.AbstractEventLoop) -> str:
    """The name of the task that the loop is in; empty between tasks. What was told its name by `Overtime` has that one."""
    try:
        task = asyncio.current_task(loop)
    except RuntimeError:  # it changed meanwhile
        return ""
    return "" if task is None else task.get_name()


def line_running(thread_ident: int) -> str:
    """The innermost line of a thread, as `file:line, in function`; empty where there is no such thread."""
    frame = sys._current_frames().get(thread_ident)
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def stack_of(thread_ident: int) -> str:
    """The innermost frames of a thread, one after the other."""
    frame = sys._current_frames().get(thread_ident)
    return "" if frame is None else "".join(traceback.format_stack(frame)[-_MAX_FRAMES:])


def place_of(loop: asyncio.AbstractEventLoop, thread_ident: int) -> str:
    """Task and line in short, for a sentence; empty where neither is known."""
    return " at ".join(filter(None, (task_running(loop), line_running(thread_ident))))
