"""An event loop whose clock leaps to whatever comes next, and connections that are no sockets.

Minutes of waiting pass at once, and the same way each time.
"""

import asyncio
import selectors


class _Selector(selectors.SelectSelector):
    """Never waits: what would be waited for is added to the loop's clock."""

    loop = None

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready and timeout:
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self.now = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self):
        return self.now


class Wire(asyncio.Transport):
    """A server's end of a connection. reads: whether the client takes what is written.

    sent     what the client has taken
    closed   when the connection ended, by the loop's clock
    """

    def __init__(self, protocol, address="10.0.0.1", reads=True):
        super().__init__()
        self.loop, self.protocol = asyncio.get_running_loop(), protocol
        self.address, self.reads = address, reads
        self.sent, self.waiting, self.closed = b"", 0, None
        self._closing = False
        protocol.connection_made(self)

    def get_extra_info(self, name, default=None):
        return {"peername": (self.address, 1), "sockname": ("10.0.0.9", 80)}.get(name, default)

    def feed(self, data):
        """Bytes from the client; a socket never gives none of them."""
        if data and self.closed is None:
            self.protocol.data_received(data)

    def write(self, data):
        if self.reads:
            self.sent += data
            return
        self.waiting += len(data)
        if self.waiting > 1 << 16:
            self.protocol.pause_writing()

    def get_write_buffer_size(self):
        return self.waiting

    def is_closing(self):
        return self._closing or self.closed is not None

    def close(self):
        self._closing = True
        if not self.waiting:
            self.abort()

    def abort(self):
        if self.closed is None:
            self.closed = self.loop.time()
            self.loop.call_soon(self.protocol.connection_lost, None)

    def pause_reading(self): ...

    def resume_reading(self): ...
