"""How KV blocks get from one node's host memory into another's."""

from .interface import BlockServer, RowRequest, Transport
from .object_store import ObjectStoreTransport, take_rows
from .peer_link import PeerLink
from .tcp import TcpTransport
from .tcp_server import TcpServer

__all__ = [
    "BlockServer",
    "ObjectStoreTransport",
    "PeerLink",
    "RowRequest",
    "TcpServer",
    "TcpTransport",
    "Transport",
    "take_rows",
]
