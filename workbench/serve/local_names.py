"""Refuse web pages that reach a server without keys through a browser on the same machine.

A server on loopback trusts every request that reaches it. A page of any site can send it requests, and can read the
answers if the site's name is made to point to this machine (DNS rebinding). A browser names the source of a request in
`Origin` or `Host`: names with a dot belong to other machines, and local clients do not need them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from workbench.serve.errors import ApiError


def is_loopback(host: str) -> bool:
    """Return whether a server bound to `host` can be reached only from its own machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_names(headers: Mapping[str, str]) -> None:
    """Refuse a request whose `Host` or `Origin` names another site.

    Args:
        headers: headers by name in lower case.

    Raises:
        ApiError: permission_error.
    """
    for name in ("host", "origin"):
        if (given := headers.get(name, "")) and not _is_local(given if name == "origin" else f"//{given}", name):
            message = f"{name}: {given[:100]!r} belongs to another site; use http://localhost, or give the server keys"
            raise ApiError("permission_error", message, name, "foreign_name")


def _is_local(url: str, header: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    if header == "origin" and (not host or "." not in host and host != "localhost" and ":" not in host):
        return False  # `null` of a page without an origin, or a name of the local network
    if host.endswith(".localhost") or "." not in host:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return header == "host" or address.is_loopback
