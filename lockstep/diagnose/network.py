"""This machine's way to the others: names, addresses, the interface and its rate."""

import os
import socket
from pathlib import Path

from lockstep.diagnose.verdicts import BAD, GOOD, WARN, Line
from lockstep.network import address_towards, interface_of


def own_name() -> list[Line]:
    """What this host's own name resolves to: gloo offers it to peers unless it is told an interface."""
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return [Line(WARN, "own name", f"{name} does not resolve here",
                     "put it into /etc/hosts; meanwhile Lockstep names the interface to gloo")]  # fmt: skip
    return [Line(GOOD, "own name", f"{name} is {address}")]


def way_to(host: str) -> list[Line]:
    """Whether `host`, the meeting point, has an address, and which way leads there."""
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        return [Line(BAD, "meeting point", f"{host} does not resolve here: {error}",
                     "use its IP address, or put the name into DNS or /etc/hosts of this machine")]  # fmt: skip
    own = address_towards(host)
    if own is None:
        return [Line(BAD, "meeting point", f"there is no way to {host} ({', '.join(addresses)})",
                     "`ip route get ADDRESS`; is the interface up?")]  # fmt: skip
    name = interface_of(own)
    rate = link_rate(name)
    speed = f", {rate * 8 / 1e6:,.0f} Mbit/s" if rate else ""
    return [Line(GOOD, "meeting point", f"{host} is {', '.join(addresses)}; the way is {own} on {name or '?'}{speed}")]


def link_rate(interface: str | None) -> float | None:
    """Bytes a second that an interface says it can do; None where it says nothing (a virtual one, the loopback)."""
    if interface is None or not Path(f"/sys/class/net/{interface}/device").exists():
        return None
    try:
        megabits = int(Path(f"/sys/class/net/{interface}/speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * 1e6 / 8 if megabits > 0 else None


def meeting_host() -> str | None:
    """The machine of rank 0, as the launcher says it; None where nobody launched this process."""
    return os.environ.get("MASTER_ADDR")
