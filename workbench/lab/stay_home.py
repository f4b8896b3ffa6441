"""Keep a kernel on its machine: connections to other hosts fail and are logged.

IPython runs a copy of this file when a kernel starts, so it imports only the standard library.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from typing import Any

LOG = "WORKBENCH_OUTSIDE_LOG"


def is_here(host: Any) -> bool:
    name = host.decode() if isinstance(host, bytes) else host
    if not isinstance(name, str) or name in ("", "localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def watch(event: str, values: tuple[Any, ...]) -> None:
    if event == "socket.getaddrinfo":
        host = values[0]
    elif event == "socket.connect" and isinstance(values[1], tuple):
        host = values[1][0]
    else:
        return
    if not is_here(host):
        with open(os.environ[LOG], "a", encoding="utf-8") as log:
            log.write(f"{host}\n")
        raise ConnectionError(f"this kernel may not leave its machine, and was asked to reach {host}")


if __name__ != "workbench.lab.stay_home" and LOG in os.environ:
    sys.addaudithook(watch)
