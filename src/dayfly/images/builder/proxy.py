"""The host's end of a builder VM's way out: an HTTP proxy that decides where a build may go.

A build reaches the Internet and nothing else: no loopback, link-local or private address, and none of this
machine's own, unless somebody named it. Names are resolved here, once, and the address that was checked is the one
that is connected to.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import anyio
import psutil
from anyio.abc import ByteStream

from dayfly.errors import ConfigError

MAX_HEAD = 64 * 1024
HEAD_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 300.0
MAX_BYTES = 64 * 1024**3
"""Of one build, both ways."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class Rule:
    """One entry of `allow`."""

    name: str = ""
    port: int | None = None
    network: IpNetwork | None = None

    def allows(self, host: str, address: Address, port: int) -> bool:
        if self.port is not None and self.port != port:
            return False
        if self.network is not None:
            return address.version == self.network.version and address in self.network
        return self.name == host.lower().rstrip(".")


def parse_rules(entries: Iterable[str]) -> tuple[Rule, ...]:
    """`host`, `host:port`, `address`, `address/bits`. Raises `ConfigError`."""
    return tuple(_parse_rule(entry.strip()) for entry in entries)


def _parse_rule(entry: str) -> Rule:
    try:
        return Rule(network=ipaddress.ip_network(entry, strict=False))
    except ValueError:
        pass
    host, port = entry, None
    if (split := _split_authority(entry)) is not None:
        host, port = split
    try:
        return Rule(network=ipaddress.ip_network(host, strict=False), port=port)
    except ValueError:
        pass
    if not host or any(c in host for c in "/:@ *"):
        raise ConfigError(
            f"{entry!r} does not say whom a build may reach", hint="write host, host:port, address or address/bits"
        )
    return Rule(name=host.lower().rstrip("."), port=port)


@dataclass
class Traffic:
    """What a build fetched from where."""

    connections: int = 0
    refused: int = 0
    bytes: int = 0


@dataclass
class Proxy:
    """The policy and the record of one build. `serve` is called for each connection."""

    rules: tuple[Rule, ...] = ()
    on_refused: Callable[[str], None] = lambda line: None
    traffic: dict[str, Traffic] = field(default_factory=dict)
    total: int = 0

    async def serve(self, client: ByteStream, first: bytes = b"") -> None:
        """One connection of a program in the guest, from its request line to its end."""
        try:
            with anyio.fail_after(HEAD_TIMEOUT_S):
                head, rest = await _read_head(client, first)
            request = _Request.parse(head)
        except (TimeoutError, ValueError):
            await _answer(client, "400 Bad Request", "this is a proxy: send CONNECT host:port or an absolute URL")
            return
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return
        entry = self._entry(f"{request.host}:{request.port}")
        if (remote := await self._connect(client, request, entry)) is None:
            return
        async with remote:
            entry.connections += 1
            if request.connect:
                await client.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                await remote.send(request.for_origin())
            if rest:
                await remote.send(rest)
            await self._pump_both(client, remote, entry)

    def _entry(self, place: str) -> Traffic:
        if place not in self.traffic and len(self.traffic) >= 1000:
            place = "(others)"
        return self.traffic.setdefault(place, Traffic())

    async def _connect(self, client: ByteStream, request: _Request, entry: Traffic) -> ByteStream | None:
        """A connection to where the request goes; None when there is none, and the client was told why."""
        try:
            with anyio.fail_after(CONNECT_TIMEOUT_S):
                found = await anyio.getaddrinfo(request.host, request.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError, TimeoutError):
            await _answer(client, "502 Bad Gateway", f"{request.host} has no address")
            return None
        addresses = [ipaddress.ip_address(str(item[4][0]).partition("%")[0]) for item in found]
        allowed = [a for a in addresses if self.may_reach(request.host, a, request.port)]
        if not allowed:
            entry.refused += 1
            line = f"a build may not reach {request.host}:{request.port} ({addresses[0]})"
            self.on_refused(line)
            await _answer(client, "403 Forbidden", f"{line}; see --allow in docs/builds.md")
            return None
        for address in allowed[:4]:
            try:
                with anyio.fail_after(CONNECT_TIMEOUT_S):
                    return await anyio.connect_tcp(str(address), request.port)
            except (OSError, TimeoutError):
                continue
        await _answer(client, "502 Bad Gateway", f"{request.host}:{request.port} does not answer")
        return None

    def may_reach(self, host: str, address: Address, port: int) -> bool:
        """Public addresses that are not this machine's, and what the rules name."""
        address = _plain(address)
        if any(rule.allows(host, address, port) for rule in self.rules):
            return True
        return address.is_global and not address.is_multicast and address not in own_addresses()

    async def _pump_both(self, client: ByteStream, remote: ByteStream, entry: Traffic) -> None:
        async with anyio.create_task_group() as tasks:

            async def pump(source: ByteStream, sink: ByteStream) -> None:
                try:
                    while True:
                        with anyio.fail_after(IDLE_TIMEOUT_S):
                            data = await source.receive(65536)
                            await sink.send(data)
                        entry.bytes += len(data)
                        self.total += len(data)
                        if self.total > MAX_BYTES:
                            break
                except anyio.EndOfStream:
                    try:
                        await sink.send_eof()
                        return
                    except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                        pass
                except (OSError, TimeoutError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                    pass
                tasks.cancel_scope.cancel()

            tasks.start_soon(pump, client, remote)
            tasks.start_soon(pump, remote, client)


def own_addresses() -> frozenset[Address]:
    """Every address of this machine's interfaces."""
    found = set()
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                found.add(ipaddress.ip_address(one.address.partition("%")[0]))
    return frozenset(found)


def _plain(address: Address) -> Address:
    """An IPv4 address that is wrapped into an IPv6 one, unwrapped."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return inner or address
    return address


@dataclass(frozen=True)
class _Request:
    connect: bool
    host: str
    port: int
    line: bytes
    headers: tuple[bytes, ...]

    @staticmethod
    def parse(head: bytes) -> _Request:
        """Raises ValueError."""
        first, *headers = head.split(b"\r\n")
        method, target, version = first.decode("ascii").split(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError("not HTTP/1")
        if method == "CONNECT":
            if (split := _split_authority(target)) is None:
                raise ValueError("no port")
            return _Request(True, split[0], split[1], first, ())
        url = urlsplit(target)
        if url.scheme != "http" or not url.hostname:
            raise ValueError("no absolute URL")
        path = url.path or "/"
        line = f"{method} {path}{'?' + url.query if url.query else ''} HTTP/1.1".encode()
        return _Request(False, url.hostname, url.port or 80, line, tuple(h for h in headers if h))

    def for_origin(self) -> bytes:
        """The request as the server gets it; one per connection, so that each is checked."""
        dropped = (b"proxy-", b"connection:", b"keep-alive:")
        kept = [h for h in self.headers if not h.lower().startswith(dropped)]
        return b"\r\n".join([self.line, *kept, b"Connection: close", b"", b""])


def _split_authority(text: str) -> tuple[str, int] | None:
    """`host:port` or `[address]:port`."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        return None
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    return (host, int(port)) if host and ":" not in host else None


async def _read_head(client: ByteStream, first: bytes) -> tuple[bytes, bytes]:
    data = first
    while b"\r\n\r\n" not in data:
        if len(data) > MAX_HEAD:
            raise ValueError("the head is too long")
        data += await client.receive(65536)
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


async def _answer(client: ByteStream, status: str, text: str) -> None:
    body = (text + "\n").encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await client.send(head.encode() + body)
