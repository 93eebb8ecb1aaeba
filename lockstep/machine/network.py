"""Finds this machine's addresses and interfaces.

They are on the route to another machine, or serve to open a port.

The interface for traffic between machines is the one on the route to the rendezvous. Finding it
sends nothing. Does not import torch.
"""

import errno
import ipaddress
import os
import socket

from lockstep.errors import UsageError

DEFAULT_PORT = 29500  # torchrun's, for the rendezvous
# addresses reserved for documentation: their route is the default route
_ANYWHERE = ("192.0.2.1", "2001:db8::1")


def address_towards(host: str) -> str | None:
    """Return this machine's address on the route to `host`.

    None if the name does not resolve or there is no route.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing, only looks up the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """Return the interface with this address."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    return None


def interface_towards(host: str) -> str | None:
    """Return the interface on the route to `host`; None without a route that leaves this machine.

    The host's own name may mean its loopback (127.0.1.1 on Debian), which others cannot reach: then
    the interface of the default route is returned.
    """
    address = address_towards(host)
    if (
        address is not None
        and is_loopback(address)
        and not is_address(host)
        and host != "localhost"
    ):
        address = next(
            (found for found in map(address_towards, _ANYWHERE) if found is not None), None
        )
    return None if address is None or is_loopback(address) else interface_of(address)


def interface_variables(host: str) -> dict[str, str]:
    """Return variables that make gloo and NCCL use the interface on the route to `host`.

    Variables that are set already are left out.

    By default gloo offers its peers the address of this host's own name, and NCCL takes the first
    interface that is up: either may lead nowhere.
    """
    interface = interface_towards(host)
    if interface is None:
        return {}
    # "=": not a prefix
    wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def is_address(host: str) -> bool:
    """Return whether `host` is an address and not a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_here(host: str) -> bool:
    """Return whether a name or an address is one of this machine."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        socket.create_server((socket.gethostbyname(host), 0)).close()
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback of this machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def require_loopback(host: str) -> None:
    """Raise a UsageError if ranks would meet at this machine's loopback, which is down.

    They would wait for minutes.
    """
    address = "127.0.0.1" if host == "localhost" else host
    if is_address(address) and is_loopback(address) and address_towards(address) is None:
        what = f"this machine can't reach itself at {address}, where its ranks meet"
        fix = (
            "switch it on: `ip link set lo up`, as root; in a container or a sandbox, allow it a"
            " network"
        )
        raise UsageError(what, why="its loopback interface (lo) is down", fix=fix)


def listener(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens only at `host`, or None if it is not an address of this machine.

    A name may mean different addresses on different machines, and with address translation a
    machine does not have the address by which others know it. Raises UsageError: the port is in
    use.
    """
    address = "127.0.0.1" if host == "localhost" else host
    if not is_address(address):
        return None
    family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    opened = socket.socket(family, kind)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(place)
        opened.listen(2048)
    except OSError as error:
        opened.close()
        if error.errno == errno.EADDRINUSE:
            raise port_in_use(host, port) from None
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return opened


def port_in_use(host: str, port: int) -> UsageError:
    """Return the error for a port on which another process listens."""
    what = f"port {port} is in use on this machine"
    why = "another run is there, or an earlier one has not gone yet"
    fix = (
        "choose another --master-port (MASTER_PORT); on one machine leave it out, and a free one is"
        " found"
    )
    return UsageError(what, where=f"{host}:{port}, where the ranks meet", why=why, fix=fix)
