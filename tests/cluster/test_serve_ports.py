"""Which gRPC peers are on this machine."""

import pytest

from tramontane.cluster.config import EngineConfig
from tramontane.cluster.serve_checks import check_ports
from tramontane.cluster.serve_ports import is_from_here
from tramontane.proto.errors import ConfigError

HERE = [
    *("ipv4:127.0.0.1:50123", "ipv4:127.9.9.9:1", "unix:/x"),
    *("ipv6:%5B::1%5D:50123", "ipv6:[::1]:5", "ipv6:%5B::ffff:127.0.0.1%5D:5"),
]
ELSEWHERE = [
    *("ipv4:10.0.0.7:5", "ipv4:localhost:5", "ipv4:", "127.0.0.1", "vsock:1:2"),
    *("ipv6:%5B2001:db8::1%5D:5", "ipv6:%5B::ffff:10.0.0.7%5D:5"),
]


@pytest.mark.parametrize("peer", HERE)
def test_loopback_is_here(peer: str) -> None:
    assert is_from_here(peer)


@pytest.mark.parametrize("peer", ELSEWHERE)
def test_everything_else_is_not(peer: str) -> None:
    assert not is_from_here(peer)


def test_the_two_ports_are_two() -> None:
    with pytest.raises(ConfigError, match="both 31999; choose another --grpc-port"):
        check_ports(EngineConfig(port=31999, grpc_port=31999))
