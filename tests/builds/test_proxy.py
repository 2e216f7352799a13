"""Where a build may go: the host's end of its way out, with real sockets."""

from __future__ import annotations

import ipaddress
import socket

import anyio
import pytest

from dayfly.errors import ConfigError
from dayfly.images.builder.proxy import Proxy, own_addresses, parse_rules


def may(proxy: Proxy, host: str, address: str, port: int = 443) -> bool:
    return proxy.may_reach(host, ipaddress.ip_address(address), port)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.8.8", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "255.255.255.255", "224.0.0.1", "::1", "::", "fe80::1", "fd00::1", "ff02::1"),
        *("::ffff:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2002:a00:1::"),
    ],
)
def test_private_and_own_addresses_are_out_of_reach(address):
    assert not may(Proxy(), "x", address)


def test_every_address_of_this_machine_is_out_of_reach():
    assert own_addresses()
    assert not [a for a in own_addresses() if Proxy().may_reach("x", a, 80)]


def test_the_rest_of_the_world_is_in_reach():
    assert may(Proxy(), "x", "93.184.216.34") and may(Proxy(), "x", "2606:2800:220:1::1")


@pytest.mark.parametrize(
    ("rule", "host", "address", "port", "allowed"),
    [
        ("mirror.test", "mirror.test", "10.0.0.1", 80, True),
        ("mirror.test", "MIRROR.test.", "10.0.0.1", 80, True),
        ("mirror.test", "other.test", "10.0.0.1", 80, False),
        ("mirror.test:80", "mirror.test", "10.0.0.1", 80, True),
        ("mirror.test:80", "mirror.test", "10.0.0.1", 22, False),
        ("10.0.0.0/8", "any", "10.9.9.9", 22, True),
        ("10.0.0.1:80", "any", "10.0.0.1", 80, True),
        ("10.0.0.1:80", "any", "10.0.0.1", 81, False),
        ("[fd00::1]:80", "any", "fd00::1", 80, True),
        ("fd00::/8", "any", "fd12::1", 80, True),
        ("10.0.0.0/8", "any", "::ffff:10.0.0.1", 80, True),
        ("10.0.0.0/8", "any", "127.0.0.1", 80, False),
    ],
)
def test_what_somebody_named_is_in_reach(rule, host, address, port, allowed):
    assert may(Proxy(parse_rules([rule])), host, address, port) is allowed


@pytest.mark.parametrize("wrong", ["", "http://x/", "*.test", "a b", "x:0", "x:99999"])
def test_a_rule_that_says_nothing_is_refused(wrong):
    with pytest.raises(ConfigError):
        parse_rules([wrong])


# --- served over real sockets ------------------------------------------------------------------------


def ask(proxy: Proxy, request: bytes, served: bytes = b"") -> tuple[bytes, bytes]:
    """What a program behind the proxy gets, and what the server on 127.0.0.1 got; {port} is the server's."""
    got = bytearray()

    async def answer(stream) -> None:
        async with stream:
            while b"\n\n" not in got and b"\r\n\r\n" not in got:
                got.extend(await stream.receive())
            await stream.send(served)

    async def main() -> bytes:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        near, far = socket.socketpair()
        async with (
            await anyio.abc.SocketStream.from_socket(near) as client,
            await anyio.abc.SocketStream.from_socket(far) as guest,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, answer)

            async def serve() -> None:
                await proxy.serve(guest)
                await guest.aclose()

            tasks.start_soon(serve)
            await client.send(request.replace(b"{port}", str(port).encode()))
            data = b""
            with anyio.fail_after(20):
                try:
                    while True:
                        data += await client.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    pass
            tasks.cancel_scope.cancel()
        await listener.aclose()
        return data

    return anyio.run(main), bytes(got)


def local() -> Proxy:
    return Proxy(parse_rules(["127.0.0.1"]))


def test_a_plain_request_is_passed_on_as_the_server_wants_it():
    proxy = local()
    request = (
        b"GET http://127.0.0.1:{port}/a?b=c HTTP/1.1\r\nHost: x\r\nProxy-Authorization: secret\r\n"
        b"Connection: keep-alive\r\nAccept: */*\r\n\r\n"
    )
    data, got = ask(proxy, request, b"HTTP/1.1 200 OK\r\n\r\nfine")
    assert data.endswith(b"fine")
    assert got.startswith(b"GET /a?b=c HTTP/1.1\r\nHost: x\r\nAccept: */*\r\nConnection: close\r\n\r\n")
    (traffic,) = proxy.traffic.values()
    assert traffic.connections == 1 and traffic.bytes > 0 and traffic.refused == 0


def test_a_tunnel_carries_bytes_both_ways():
    data, got = ask(local(), b"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\nhello\n\n", b"world")
    assert data.startswith(b"HTTP/1.1 200") and data.endswith(b"world")
    assert got == b"hello\n\n"


@pytest.mark.parametrize("place", [b"127.0.0.1", b"localhost", b"[::ffff:127.0.0.1]", b"2130706433", b"0x7f.1"])
def test_the_hosts_own_services_are_out_of_reach_however_they_are_written(place):
    said: list[str] = []
    proxy = Proxy(on_refused=said.append)
    data, got = ask(proxy, b"CONNECT " + place + b":{port} HTTP/1.1\r\n\r\nhello\n\n", b"world")
    assert data.startswith((b"HTTP/1.1 403", b"HTTP/1.1 502"))
    assert not got and b"world" not in data
    assert data.startswith(b"HTTP/1.1 502") or "may not reach" in said[0]


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"CONNECT x HTTP/1.1\r\n\r\n",
        b"GET ftp://x/ HTTP/1.1\r\n\r\n",
        b"\xff\xfe \x00 \x01\r\n\r\n",
        b"a" * 200_000,
    ],
)
def test_what_is_no_request_gets_an_answer_and_goes_nowhere(request_):
    proxy = local()
    data, got = ask(proxy, request_)
    assert data.startswith(b"HTTP/1.1 400") and not got and not proxy.traffic
