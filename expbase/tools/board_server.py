"""Runs VisualDL's server, and refuses requests by a foreign name.

A page of somebody else may give its own name the address of this machine; then the browser lets the
page read the answers (DNS rebinding). board.py runs this file as a program, so that it imports no
paddle: `python board_server.py HOST`, and the options of VisualDL.
"""

from __future__ import annotations

import ipaddress
import runpy
import socket
import sys
from typing import Any
from urllib.parse import urlsplit


def is_ours(host: str, given: str) -> bool:
    """Returns whether the header `Host` is an address, a name of this machine, or --host."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name in ("localhost", socket.gethostname().lower(), given.lower()):
            return True
        ipaddress.ip_address(name)  # an address cannot be given another one
    except ValueError:
        return False
    return True


def main() -> None:
    """Runs the server."""
    import flask  # here: the tests import this file

    given = sys.argv.pop(1)
    sys.path.pop(0)  # this folder: its files are nobody's modules

    def check(app: Any) -> None:
        host = flask.request.host
        if not is_ours(host, given):
            text = f"{host!r} is no name of this machine; expected its address, or --host NAME.\n"
            flask.abort(flask.Response(text, 403, mimetype="text/plain"))

    flask.request_started.connect(check)
    runpy.run_module("visualdl.server.app", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
