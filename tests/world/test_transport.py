"""The format in which a state travels, and the server that hands it out."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from io import BytesIO

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.world.contract import Tree
from shoal.world.elastic import state_server
from shoal.world.elastic.state_server import (
    StateServer,
    await_settled,
    fetch_state,
    fetch_where,
    join_address,
    listen,
    split_address,
)
from shoal.world.elastic.transport import TransferError, decode, encode, state_hash

TOKEN = "the run's secret"
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
]


def wire(tree: Tree) -> bytes:
    return b"".join(bytes(chunk) for chunk in encode(tree).chunks())


def read(data: bytes, announced: int | None = None) -> Tree:
    return decode(BytesIO(data).readinto, len(data) if announced is None else announced)


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and wire(a) == wire(b)
        )
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and list(a) == list(b)
            and [type(key) for key in a] == [type(key) for key in b]
            and all(same(a[key], b[key]) for key in a)
        )
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


TENSORS = st.builds(
    lambda dtype, shape: torch.randint(0, 2, shape).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
)
TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(TREES)
def test_any_state_arrives_as_it_was(tree: Tree) -> None:
    data = wire(tree)
    assert len(data) == encode(tree).length_bytes
    assert same(tree, read(data))
    assert state_hash(tree) == state_hash(read(data))


def state() -> dict[str, Tree]:
    return {
        "weights": torch.arange(6.0).reshape(2, 3),
        "turned": torch.arange(6).reshape(2, 3).t(),
        "half": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "mask": torch.tensor([True, False]),
        "optimizer": {0: {"step": 3, "lr": float("inf")}, 1: None},
        "order": (1, [2, "three"]),
    }


def test_a_non_contiguous_tensor_keeps_its_values_and_the_receiver_owns_what_it_gets() -> None:
    received = read(wire(state()))
    assert isinstance(received, dict)
    turned, weights = received["turned"], received["weights"]
    assert isinstance(turned, torch.Tensor) and isinstance(weights, torch.Tensor)
    assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]
    weights += 1
    assert weights.untyped_storage().nbytes() == 24
    assert list(received["optimizer"]) == [0, 1]


def test_truncation_at_every_byte_is_an_error() -> None:
    data = wire(state())
    for length in range(len(data)):
        with pytest.raises(TransferError):
            read(data[:length])
        with pytest.raises(TransferError):
            read(data[:length], announced=len(data))
    with pytest.raises(TransferError):
        read(data + b"x")


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_head_never_gives_more_than_an_error(at: int, flip: int) -> None:
    """Whatever the sender claims, nothing is evaluated, and nothing but TransferError comes out."""
    data = bytearray(wire(state()))
    head = len(encode(state()).head)
    data[at % head] ^= flip
    try:
        read(bytes(data))
    except TransferError:
        return


@pytest.mark.parametrize(
    ("skeleton", "raw"),
    [
        (b'{"tensors":[["float32",[4000000000]]],"tree":["x",0]}', b""),
        (b'{"tensors":[["float32",[-1]]],"tree":["x",0]}', b""),
        (b'{"tensors":[["object",[1]]],"tree":["x",0]}', b"1234"),
        (b'{"tensors":[["uint8",[1]]],"tree":["x",1]}', b"1"),
        (b'{"tensors":[["uint8",[1]]],"tree":["l",["x",0],["x",0]]}', b"1"),
        (b'{"tensors":[["uint8",[1]]],"tree":null}', b"1"),
        (b'{"tensors":[],"tree":["d",[1.5,2]]}', b""),
        (b'{"tensors":[],"tree":["q"]}', b""),
        (b"[]", b""),
        (b"[" * 100_000, b""),
    ],
)
def test_absurd_claims_are_refused_before_memory_is_taken(skeleton: bytes, raw: bytes) -> None:
    data = b"SHOALST1" + len(skeleton).to_bytes(8, "little") + skeleton + raw
    with pytest.raises(TransferError):
        read(data)


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"a": {"b": object()}}, r"state\['a'\]\['b'\] is a object"),
        ({"a": [1, b"bytes"]}, r"state\['a'\]\[1\] is a bytes"),
        ({1.5: 1}, "keys of a state"),
        ({True: 1}, "keys of a state"),
        (torch.eye(2).to_sparse(), "dense tensors"),
    ],
)
def test_what_cannot_travel_is_named(tree: Tree, where: str) -> None:
    with pytest.raises(TypeError, match=where):
        encode(tree)


def test_the_hash_sees_every_part() -> None:
    hashes = {
        state_hash(tree)
        for tree in (
            {"a": torch.zeros(2)},
            {"a": torch.zeros(2, dtype=torch.int32)},
            {"a": torch.zeros(1, 2)},
            {"b": torch.zeros(2)},
            {"a": torch.tensor([0.0, -0.0])},
            {"a": [0.0, 0.0]},
            {1: torch.zeros(2)},
            {"1": torch.zeros(2)},
        )
    }
    assert len(hashes) == 8


@pytest.fixture
def server():
    server = StateServer("127.0.0.1", TOKEN, patience_seconds=0.3)
    yield server
    server.close()
    server.close()


def address(server: StateServer) -> str:
    return f"127.0.0.1:{server.port}"


def fetch(server: StateServer, key: str, token: str = TOKEN) -> Tree:
    return fetch_state(address(server), key, token, 2.0, expected_nonce="n1")


def test_a_published_state_is_fetched(server: StateServer) -> None:
    server.publish("key", state())
    assert same(fetch(server, "key"), state())


@pytest.mark.parametrize("shown", ["", "Bearer ", "Bearer wrong", TOKEN, f"bearer {TOKEN}", "é"])
@pytest.mark.parametrize("path", ["/state/key", "/where", "/settled/t/0", "/"])
def test_without_the_token_nothing_is_told(server: StateServer, shown: str, path: str) -> None:
    server.publish("key", state())
    server.tell({"nonce": "n1"})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    headers = {"Authorization": shown.encode()} if shown else {}
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    assert reply.status == 403
    assert b"n1" not in reply.read()
    connection.close()


def test_a_wrong_token_is_an_error_of_the_transfer(server: StateServer) -> None:
    server.publish("key", state())
    with pytest.raises(TransferError, match="403"):
        fetch(server, "key", token="guess")
    assert fetch_where(address(server), "guess", 2.0) is None


def test_a_withdrawn_or_unknown_state_is_waited_for_only_while_it_can_come(
    server: StateServer,
) -> None:
    server.tell({"nonce": "n2"})
    server.publish("key", state())
    server.withdraw()
    for key in ("key", "other"):
        with pytest.raises(TransferError, match="404"):
            fetch(server, key)


def test_a_state_that_is_still_prepared_is_waited_for(server: StateServer) -> None:
    server.tell({"nonce": "n1"})
    asked = threading.Event()
    find = server.find

    def finding(key: str):
        asked.set()
        return find(key)

    server.find = finding
    publisher = threading.Thread(
        target=lambda: (asked.wait(5), time.sleep(0.5), server.publish("key", state()))
    )
    publisher.start()
    assert same(fetch(server, "key"), state())
    publisher.join()


def test_where_tells_the_last_request(server: StateServer) -> None:
    assert fetch_where(address(server), TOKEN, 2.0) == {}
    server.tell({"nonce": "n7"})
    assert fetch_where(address(server), TOKEN, 2.0) == {"nonce": "n7"}


def test_a_peer_that_is_gone_is_an_error(server: StateServer) -> None:
    there = address(server)
    server.close()
    with pytest.raises(TransferError):
        fetch_state(there, "key", TOKEN, 1.0, expected_nonce="n1")
    assert fetch_where(there, TOKEN, 1.0) is None


@pytest.mark.parametrize("cut", [0, 1, 20, 200, -1])
def test_a_source_that_dies_in_the_transfer_is_an_error_not_a_hang(cut: int) -> None:
    data = wire(state())
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with listen("127.0.0.1") as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(head + data[:cut] if cut else b"")

        thread = threading.Thread(target=serve)
        thread.start()
        port = listening.getsockname()[1]
        with pytest.raises(TransferError):
            fetch_state(f"127.0.0.1:{port}", "key", TOKEN, 2.0, expected_nonce="n1")
        thread.join()


def test_a_source_that_stands_still_is_an_error() -> None:
    with listen("127.0.0.1") as listening:
        port = listening.getsockname()[1]
        with pytest.raises(TransferError):
            fetch_state(f"127.0.0.1:{port}", "key", TOKEN, 0.1, expected_nonce="n1")


def test_a_reader_that_stands_still_does_not_keep_the_snapshot(server: StateServer) -> None:
    big = torch.zeros(20_000_000)
    server.publish("key", big)
    with socket.create_connection(("127.0.0.1", server.port)) as reader:
        request = f"GET /state/key HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        reader.sendall(request.encode())
        reader.recv(10)
        server.withdraw()
        deadline = time.monotonic() + 10
        while any("process_request" in t.name for t in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_silent_connection_is_closed(server: StateServer, monkeypatch) -> None:
    monkeypatch.setattr(state_server._Handler, "timeout", 0.2)
    for said in (b"", b"GET /where HTTP/1.1\r\nHost: x\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), 10) as silent:
            silent.sendall(said)
            assert silent.recv(100) == b""


def test_there_are_only_so_many_connections(server: StateServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(state_server.MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
        one_more = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
        assert one_more.recv(100) == b""
    deadline = time.monotonic() + 10
    while fetch_where(address(server), TOKEN, 2.0) is None:
        assert time.monotonic() < deadline, "their places are free again"


def test_a_peer_is_waited_for_until_it_is_done_with_an_exchange(server: StateServer) -> None:
    def done(membership: str, count: int, seconds: float = 5.0) -> bool:
        return await_settled(address(server), membership, count, TOKEN, seconds)

    server.enter("t1")
    assert done("t0", 3), "a membership that is over"
    server.settle()
    assert (done("t1", 1), done("t1", 2, 0.05)) == (True, False)
    waiting = threading.Timer(0.1, server.settle)
    waiting.start()
    assert done("t1", 2)
    waiting.join()
    server.close()
    assert done("t1", 3), "a peer that is gone"


def test_addresses() -> None:
    assert split_address("example.org:80") == ("example.org", 80)
    assert split_address(join_address("::1", 5)) == ("::1", 5)
    with pytest.raises(UsageError, match=r"192\.0\.2\.1.*not an address of this machine"):
        listen("192.0.2.1")
