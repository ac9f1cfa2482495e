"""A terminal for rank 0, whose output the launcher passes on to its own.

Rank 0 could write to the launcher's terminal directly, but then nobody would know whether its cursor stands
in the middle of a progress bar when another rank has something to say, nor have its traceback at hand in the
end.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import tty
from typing import final

__all__ = ["Terminal"]

_NO_SIZE = struct.pack("HHHH", 0, 0, 0, 0)


@final
class Terminal:
    """A pseudo terminal of the same size as the real one.

    Attributes:
        reader: Where the output arrives; the owner closes it.
        writer: What the rank gets; closed by ``close_writer`` once the rank has it.
    """

    def __init__(self, real: int) -> None:
        """Open it.

        Args:
            real: Descriptor of the real terminal, whose size is copied.
        """
        self.reader, self.writer = os.openpty()
        self._real = real
        tty.setraw(self.writer)  # bytes arrive as they were written; the real terminal turns \n into \r\n
        self.copy_size()

    def copy_size(self) -> None:
        """Take over the size of the real terminal, at first and whenever it changes."""
        try:
            size = fcntl.ioctl(self._real, termios.TIOCGWINSZ, _NO_SIZE)
            fcntl.ioctl(self.reader, termios.TIOCSWINSZ, size)
        except OSError:
            return  # a terminal without a size, or one that is gone: programs then assume 80 columns

    def close_writer(self) -> None:
        """Close our copy of the rank's end, so that the end of the rank is the end of the stream."""
        os.close(self.writer)
